"""`ai3_ops.swap`: who computes each call is decided, and applied to the model."""

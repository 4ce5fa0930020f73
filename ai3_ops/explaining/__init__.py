"""`ai3_ops.explain`: what computes each layer, and what `optimize` did."""

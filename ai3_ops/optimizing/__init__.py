"""`ai3_ops.optimize`: the fastest form of a model that is found."""

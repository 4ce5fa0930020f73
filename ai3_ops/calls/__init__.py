"""The calls of swapped modules: which algorithm computes each, and how it is made."""

"""The four steps of `ai3_ops.swap`: discover the calls, describe them, decide who computes them, apply that."""

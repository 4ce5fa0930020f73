"""Whole networks: programs that run many layers in one call."""

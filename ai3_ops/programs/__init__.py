"""Graphs of steps as programs, which C++ runs in one call."""

"""A process's work that never ends, in a file of its own: the new process imports the file that has it."""

import threading


def never_ends(to, *_):
    """In place of `benchmarks.ways._measure`: our call's seconds, and no more."""
    to.send(0.25)
    threading.Event().wait()

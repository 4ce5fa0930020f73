"""Times and errors of algorithms on this machine, and the records of them on disk."""

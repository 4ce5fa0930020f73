"""Who computes what: the forms that a choice is given in, and which calls each of them means."""

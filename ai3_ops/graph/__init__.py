"""A model as a graph of steps: captured, brought into one form, rewritten."""

"""Algorithms from elsewhere, and the algorithms made known elsewhere."""

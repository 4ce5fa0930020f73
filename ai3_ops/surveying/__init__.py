"""Which calls a model makes: found in its modules and their sources, and seen when it runs."""

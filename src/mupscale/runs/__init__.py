"""A run: a model together with everything that trains it."""

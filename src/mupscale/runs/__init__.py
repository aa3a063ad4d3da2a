"""A run: a model together with everything that trains it, and how it came to be.

Imports plans, models, optimizers and files. Grows and measures nothing.
"""

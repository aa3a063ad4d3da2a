"""Initialise a model at any width from its sizes at the reference.

Imports models, plans and runs.
"""

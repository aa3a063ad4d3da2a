"""Train at any width in the units of each tensor: parameter groups, steps, settings, clipping.

Imports optimizers, plans and runs.
"""

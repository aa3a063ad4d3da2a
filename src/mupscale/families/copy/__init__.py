"""Small copies of stock models: how a configuration is made small, what is tried on it, and how its plan is lifted.

Imports config and types. `trial.py` is the one way in which a step of growth is tried.
"""

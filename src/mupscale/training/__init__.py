"""Live runs: `start` one, train it in `units`, `grow` it, set its `rates`, `check` it; and the recipe.

Imports planning and everything below. Each folder says which of the others it may import.
"""

"""How much noise each weight gets, and where: kinds, places, measured sizes, one resolved value per tensor.

Knows no run. Imports plans, models, tensors and rules.
"""

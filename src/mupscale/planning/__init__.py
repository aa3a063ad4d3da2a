"""Find the plan of two live models: a draft from shapes, `facts/` about modules, and `search/` by measuring.

Imports proofs (the gradient identity) and everything below. Grows nothing.
"""

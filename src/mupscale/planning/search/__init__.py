"""Try hypotheses about a draft in float64 until the gradient identity holds, and say what to change next.

Imports facts and the draft.
"""

"""Check a run: `verify`, registry rows on real steps, coordinates, whether what is new is used.

Imports grow and units next to it.
"""

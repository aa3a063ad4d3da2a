"""Check a run: `verify`, registry rows on real steps, coordinates, whether what is new is used; and a machine: demo, device.

Imports grow and units next to it.
"""

"""Rows of `benchmarks/growth.py`: what grows, by how much, and the control beside it; one file for each kind of growth."""

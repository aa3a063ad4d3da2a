"""Rows of `benchmarks/growth.py`: what grows, by how much, and the control next to it; one file for each kind of growth."""

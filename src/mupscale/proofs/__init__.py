"""Comparisons of two models or two runs: the gradient identity, steps side by side, and the certificate of what was measured.

Imports noise, runs and everything below. Grows nothing and finds no plan.
"""

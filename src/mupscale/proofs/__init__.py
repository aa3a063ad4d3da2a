"""Comparisons of two models or two runs, and the certificate of what was measured. Widens nothing."""

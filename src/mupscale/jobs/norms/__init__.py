"""Norms of the base's tensors, measured where they lie and kept for whoever resumes.

Imports bytes and journal next to it.
"""

"""Hugging Face model types: which fields of a configuration grow, and what their tensors look like.

`config/` reads configurations, `types/` holds what is special about a type, `copy/` makes a model small and tries growth on
it, `steps/` are the directions in which a model grows. The files here plan, prove, and load real weights.
"""

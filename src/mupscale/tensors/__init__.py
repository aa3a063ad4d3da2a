"""One tensor at a time: widening a slice, its noise, and the way back.

Works on any device and dtype. Knows nothing about modules, names, files or ranks.
"""

"""The arithmetic of widening: exact scales, units, axes, optimizers, sizes of noise.

Pure Python. Nothing in this folder imports torch, and a test holds it to that.
"""

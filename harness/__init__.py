"""What tests and benchmarks share: small models and their data, optimizers, checkpoints, servers, launched ranks.

Tests and benchmarks may import this folder, and not each other; this folder imports neither. `program.py` runs benchmarks.
"""

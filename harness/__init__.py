"""What tests and benchmarks share: small models and their data, optimizers, checkpoints, servers, launched ranks.

Tests may import this folder and the benchmarks; benchmarks may import this folder only; this folder imports neither.
"""

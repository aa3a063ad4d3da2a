"""Checkpoints of other trainers, one folder for each format: what it is on disk, how it grows, what a live job needs.

Imports jobs and the rooms before it; knows nothing of Hugging Face directories. A further format is one more folder, whose
`__init__` has its `FORMAT`.
"""

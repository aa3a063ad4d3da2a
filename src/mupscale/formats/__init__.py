"""Checkpoints of other trainers, one folder or file for each format: what it is on disk, how it grows, what a live job needs.

Imports jobs and the rooms before it; knows nothing of Hugging Face directories.
"""

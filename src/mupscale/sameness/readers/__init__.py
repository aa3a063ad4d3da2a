"""Snapshots of the formats: a Hugging Face directory with what a Trainer left in it, and checkpoints of other trainers.

What cannot be told from the files is noted in the snapshot, never guessed.
"""

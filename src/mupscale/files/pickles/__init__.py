"""Pickles and archives of torch.save, read without executing what they hold.

Imports files of the room. Knows no format of checkpoints.
"""

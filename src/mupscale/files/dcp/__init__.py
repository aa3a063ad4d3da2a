"""Directories of `torch.distributed.checkpoint`: their metadata, chunks and where each lies.

Imports pickles next to it.
"""

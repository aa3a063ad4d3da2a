"""What workers have done, written down so that a job goes on where it was killed.

Imports bytes next to it.
"""

"""Learning rates and schedules through growth.

Imports units next to it and optimizers.
"""

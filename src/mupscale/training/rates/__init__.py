"""Learning rates and schedules through growth.

Imports units beside it and optimizers.
"""

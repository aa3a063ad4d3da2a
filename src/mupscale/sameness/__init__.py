"""Whether two checkpoints continue the same run: what each holds, by name, and a comparison of the two.

The formats are read by the rooms before this one; nothing here grows, and nothing of a pickle is executed.
"""

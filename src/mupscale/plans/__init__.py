"""Which axes grow: the plan as a value, how it is inferred, searched for, explained and tested.

A plan is keyed by the wide model's tensor names and lives outside every tensor.
"""

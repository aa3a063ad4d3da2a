"""An optimizer as named data: read from objects or state dicts, carried to other units in one place, written back.

Imports plans, models, files, tensors and rules. The only room that changes the units of a state.
"""

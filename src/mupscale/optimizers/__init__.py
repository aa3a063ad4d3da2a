"""An optimizer as named data: read from objects or state dicts, carried to other units in one place, written back."""

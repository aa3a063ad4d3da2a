"""An optimizer as named data: read from wherever it lies, carried to other units in one place, written anywhere."""

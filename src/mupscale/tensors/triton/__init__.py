"""The optional Triton kernel for noisy slices on a GPU, its launch, and its comparison with the portable code.

Imports the files of `tensors/` that define a slice, and triton only when it is launched.
"""

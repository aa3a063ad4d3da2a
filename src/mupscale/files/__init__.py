"""Bytes on disk: where tensors lie in a file or a directory, and what of it may be trusted. Moves nothing."""

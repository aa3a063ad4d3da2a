"""Bytes on disk: where tensors lie in a file or a directory, read strictly. Moves nothing."""

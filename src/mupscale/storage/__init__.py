"""Files that are not on this machine: URLs, range reads and uploads through fsspec."""

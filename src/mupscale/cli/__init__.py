"""The command line: one verb a file, no arithmetic of its own."""

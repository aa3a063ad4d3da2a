"""The bytes of a job: read from the base, made block by block, fingerprinted, brought to disk.

Imports the job and its units. Knows no journal.
"""

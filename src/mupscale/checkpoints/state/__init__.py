"""The optimizer state next to the weights of a directory: whose it is, and what it becomes.

Imports the request. Plans nothing.
"""

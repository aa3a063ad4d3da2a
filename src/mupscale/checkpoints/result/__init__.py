"""What a grown directory holds besides weights and state: its card, a training script, modules, and what was left out.

Imports the request and the shards.
"""

"""Sharded jobs: a narrow checkpoint, or a running base, straight into the shards of a wide model."""

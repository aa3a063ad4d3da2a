"""Stock trainers that go on from a grown checkpoint: an optimizer in units, callbacks, Lightning files."""

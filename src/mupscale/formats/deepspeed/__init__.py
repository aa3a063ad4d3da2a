"""DeepSpeed: its universal checkpoint, how it grows, and an engine that loads it."""

"""Checkpoints that people have: Hugging Face directories and what a Trainer left in them, as jobs of growth."""

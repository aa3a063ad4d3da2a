"""MLPs on Forest Cover Type, with SGD and with AdamW."""

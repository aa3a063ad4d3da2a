"""Hugging Face model types: which fields of a configuration grow, and what their tensors look like."""

"""The study of a Hugging Face directory: its proxy, its settings and its text."""

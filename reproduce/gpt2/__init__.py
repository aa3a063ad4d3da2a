"""GPT-2 on textbooks (OpenStax, in the place of FineWeb-Edu), with AdamW."""

"""What is stored as tables, as one line of figures, and as a check of what the pages say."""

"""What is trained: a model of any size with its data, on the real ones or on made-up ones."""

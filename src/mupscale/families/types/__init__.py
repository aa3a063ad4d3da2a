"""What is special about a model type: rows of the registry, expressions about sizes, declarations, other classes that hold it."""

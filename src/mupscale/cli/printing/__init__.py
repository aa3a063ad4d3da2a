"""What several verbs print: next steps, names as they are stored, log records, what is being done."""

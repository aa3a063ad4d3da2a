"""Programs that measure what this package claims, and exit non-zero when a claim fails."""

"""Live runs: widening and narrowing a model with everything that trains it, and the certificate."""

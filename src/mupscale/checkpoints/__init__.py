"""Disk: weights with their provenance inside."""

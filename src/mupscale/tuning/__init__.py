"""Tune small, apply large: what it costs and when it pays."""

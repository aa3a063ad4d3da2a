"""Configurations as plain nested data: what a user asked to grow, the fields that change, and what is refused.

Builds no model but configuration objects.
"""

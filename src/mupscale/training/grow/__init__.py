"""Grow a run: prove the plan, carry weights and state, add noise, choose the rate.

Imports units and rates beside it, and planning below.
"""

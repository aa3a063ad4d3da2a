"""Situations around a model: training loops, hooks, schedules, wrappers and plans as people write them.

Each file holds one kind of situation. `LOOPS` has all of them by name.
"""

from harness.loops import frozen, hooks, modes, plans, schedules, state, training, wrappers
from harness.loops.situation import LOOPS

KINDS = (modes, hooks, state, frozen, schedules, training, wrappers, plans)

__all__ = ["KINDS", "LOOPS"]

"""Budgets: the FLOPs of a step, what base, tuning and growth cost, and whether to stay, grow or start anew; needs no study.

Also the namespace of these. May import `families` and what comes before it.
"""

import typing as _typing

from ..lazy import exported as _exported

if _typing.TYPE_CHECKING:
    from .advice import advise as advise

__getattr__ = _exported(__name__)

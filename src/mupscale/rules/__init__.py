"""The arithmetic of widening: exact scales, units, axes, optimizers, sizes of noise.

Pure Python. Nothing in this folder imports torch, and a test checks it.
"""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..training.check.optimizer_row import check_optimizer as check_optimizer
    from .axes import Axis as Axis  # not listed
    from .optimizer_rule import DIMENSIONS as DIMENSIONS  # not listed
    from .optimizer_rule import Decay as Decay  # not listed
    from .optimizer_rule import OptimizerRule as OptimizerRule
    from .optimizer_rule import State as State
    from .optimizer_rule import declare_neutral as declare_neutral
    from .optimizers import register_optimizer as register_optimizer
    from .products import Factor as Factor  # not listed
    from .scale import Scale as Scale  # not listed
    from .units import BLOCKS as BLOCKS  # not listed
    from .units import COLUMNS as COLUMNS  # not listed
    from .units import FILLED as FILLED  # not listed
    from .units import NEUTRAL as NEUTRAL  # not listed
    from .units import ROWS as ROWS  # not listed
    from .units import SHORT as SHORT  # not listed
    from .units import Change as Change  # not listed
    from .units import G as G
    from .units import Units as Units  # not listed
    from .units import W as W

__getattr__ = exported(__name__)

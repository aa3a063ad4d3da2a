"""Which axes grow: the plan as a value, how it is inferred, searched for, explained and tested.

A plan is keyed by the wide model's tensor names and lives outside every tensor.
"""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..families.plan import family_plan as family_plan
    from ..models.build import build as _build
    from ..proofs.identity import gradient_identity as gradient_identity
    from .tensor_plan import TensorPlan as TensorPlan

    on_meta = _build

_NAMES = {
    "TensorPlan": ("plans.tensor_plan", ""),
    "gradient_identity": ("proofs.identity", ""),
    "family_plan": ("families.plan", "hf"),
    "on_meta": ("models.build:build", ""),
}
__all__ = [*_NAMES]
__getattr__ = exported(__name__, _NAMES)

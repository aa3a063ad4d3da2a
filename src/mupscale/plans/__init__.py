"""The plan as a value, and the map that it is: tensors, attributes, hooks and whole models at the other end of it.

A plan is keyed by the wide model's tensor names and lives outside every tensor. Imports models, tensors and rules;
`planning` finds plans.
"""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..families.plan import family_plan as family_plan
    from ..models.build import on_meta as on_meta
    from ..planning.infer import plan_between as plan_between
    from .tensor_plan import TensorPlan as TensorPlan  # not listed

__getattr__ = exported(__name__, {"family_plan": "hf"})

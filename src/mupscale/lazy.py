"""Names that are imported when they are first used, so that `import mupscale` costs nothing and needs no torch.

`mupscale.verify` imports `training/check/verify.py` then, and not before; where a package of an extra is missing, the error
names the extra. Callbacks of other libraries are classes that can be
made only when those libraries are there; `lazy_subclass` makes them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .extras import needs

Lookup = Callable[[str], Any]
_EXPORT = re.compile(r"^    from (\.[.\w]*) import (\w+) as \2(  # not listed)?$", re.MULTILINE)
"""One line of a namespace's block for type checkers: the module, the name, and whether it is left out of lists."""
EARLIER = {
    "mupscale.widen": "mupscale.grow",
    "mupscale.load_wide": "mupscale.load_grown_",
    "mupscale.widen_state_dict": "mupscale.trainers.grow_state_dict",
    "mupscale.widen_optimizer_state_dict": "mupscale.trainers.grow_optimizer_state_dict",
    "mupscale.optimizer_for": "mupscale.trainers.optimizer_in_units",
    "mupscale.clip_": "mupscale.clip_before_step_",
    "mupscale.init_": "mupscale.init_weights_",
    "mupscale.plan_between": "mupscale.plans.plan_between",
    "mupscale.Recipe": "mupscale.studies.Recipe",
    "mupscale.advise": "mupscale.budgets.advise",
    "mupscale.trainers.widen_lightning_checkpoint": "mupscale.grow_checkpoint",
    "mupscale.trainers.grow_lightning_checkpoint": "mupscale.grow_checkpoint",
    "mupscale.trainers.grow_megatron_checkpoint": "mupscale.grow_checkpoint",
    "mupscale.trainers.grow_universal_checkpoint": "mupscale.grow_checkpoint",
    "mupscale.trainers.narrow_state_dict": "mupscale.narrow",
    "mupscale.trainers.narrow_optimizer_state_dict": "mupscale.narrow",
    "mupscale.diagnostics.noise_report": "mupscale.diagnostics.growth_numbers",
    "mupscale.diagnostics.noise_shares": "mupscale.diagnostics.growth_numbers",
    "mupscale.diagnostics.symmetry": "mupscale.diagnostics.growth_numbers",
    "mupscale.diagnostics.awake": "mupscale.diagnostics.growth_numbers",
    "mupscale.diagnostics.grad_norm": "mupscale.trainers.clip_grad_norm_",
    "mupscale.diagnostics.clip_grad_norm_": "mupscale.trainers.clip_grad_norm_",
    "mupscale.diagnostics.clip_grad_value_": "mupscale.clip_before_step_",
    "mupscale.rules.rule_by": "mupscale.rules.OptimizerRule.by_key",
    "mupscale.rules.rule_for": "mupscale.rules.register_optimizer",
    "mupscale.rules.muon_row": "mupscale.rules.register_optimizer",
    "mupscale.diagnostics.report": "mupscale.studies.report.report.write_report",
    "mupscale.studies.write_report": "mupscale.studies.report.report.write_report",
    "mupscale.budgets.Cost": "mupscale.budgets.cost.Cost",
    "mupscale.plans.more_experts_plan": "mupscale.infer_plan",
    "mupscale.plans.gradient_identity": "mupscale.verify",
    "mupscale.trainers.universal_groups": "mupscale.trainers.groups_for",
    "mupscale.trainers.megatron_layouts": "mupscale.Declared.megatron",
    "mupscale.trainers.titan_plan": "mupscale.trainers.titan_layouts.titan_plan",
    "mupscale.assert_same_run": "mupscale.same",
}
"""Names of an earlier version, and what they are called now; the error about a missing name says it."""


def exported(namespace: str, extras: Mapping[str, str] | None = None) -> Lookup:
    """The `__getattr__` of a namespace: imports a name of its `if TYPE_CHECKING:` block when the name is first used.

    The block is read from the source text, so that type checkers and Python have one table. Each line of it is
    `from .module import name as name`; `from . import name as name` exports a namespace. `extras` says which names need
    the packages of an extra. The namespace also gets `__all__`, and a `__dir__` for completion in editors and shells, without
    the lines that end in `# not listed`: what is read and not written, as the types of results, for annotations.

    >>> exported("mupscale.rules")("Axis").__module__
    'mupscale.rules.axes'
    >>> exported("mupscale")("widen")
    Traceback (most recent call last):
    AttributeError: module 'mupscale' has no attribute 'widen'; it is mupscale.grow now
    """
    module: Any = sys.modules[namespace]
    lines = _EXPORT.findall(module.__loader__.get_source(namespace))
    places, listed = (
        {name: place for place, name, _ in lines},
        [name for _, name, left_out in lines if not left_out],
    )

    def look(name: str) -> Any:
        if name not in places:
            now = EARLIER.get(f"{namespace}.{name}")
            renamed = f"; it is {now} now" if now else ""
            raise AttributeError(f"module {namespace!r} has no attribute {name!r}{renamed}")
        if places[name] == ".":
            return import_module(f".{name}", module.__package__)
        extra = (extras or {}).get(name)
        with needs(f"{namespace}.{name}", *((extra,) if extra else ())):
            found = getattr(import_module(places[name], module.__package__), name)
        setattr(module, name, found)
        return found

    module.__all__ = [name for name in listed if places[name] != "."]
    module._unlisted = [name for name in places if name not in listed]
    module.__dir__ = lambda: sorted({*vars(module), *listed} - {*module._unlisted})
    return look


def lazy_subclass(
    module: str,
    name: str,
    hooks: type,
    parent: Callable[[], type],
    more: Callable[[type], Mapping[str, Any]] | None = None,
) -> Lookup:
    """The `__getattr__` of a module with one class: `hooks` over the class that `parent` imports.

    `more` gives further attributes, from the parent. The class is made once and kept in its module, so that it can be
    pickled and found again.

    >>> look = lazy_subclass("mupscale.lazy", "Callback", type("Hooks", (), {}), lambda: dict)
    >>> look("Callback") is sys.modules["mupscale.lazy"].Callback
    True
    """

    def look(attribute: str) -> Any:
        if attribute != name:
            raise AttributeError(f"module {module!r} has no attribute {attribute!r}")
        base = parent()
        attributes = {} if more is None else more(base)
        made = type(name, (hooks, base), {"__module__": module, "__doc__": hooks.__doc__, **attributes})
        setattr(sys.modules[module], name, made)
        return made

    return look

"""Wider stock models: the last step, whose plan is found on a small copy and lifted to the full size.

Where zeros follow the copies, norms that subtract the mean are refused, and the plan is tried at a second size.

Some folds depend on how much of an axis is filled, and the full model fills another share than its small copy. So the
plan of the copy is tried at a second share, by the same rule that brings it to the full size. A fold that was right by
chance fails there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from ...errors import Fault, raise_faults
from ...models.kinds import is_batch_norm, is_norm
from ...models.names import name_in, pattern_of
from ...planning.facts.padded_norms import centred_fault, subtracts_mean
from ...planning.search.search import Found
from ...plans.more_experts import without_experts
from ...plans.plan import Plan
from ...plans.rows import without_rows
from ...plans.tensor_plan import Powers
from ...rules.axes import Axis
from ...rules.scale import Scale
from ..config.goal import Goal
from ..copy.lift import Tensors, lift
from ..copy.small_search import declared_layouts, growing_sizes
from ..copy.trial import End, trial
from ..models import Config, as_data, on_meta
from ..types.declarations import Declarations
from ..types.export import wide_of


def refuse_layer_norms(small: Any, base: Tensors, wide: Tensors) -> None:
    """Raise if a norm of the full model that would get zeros subtracts the mean; `small` is a copy that can run."""
    centred = {
        name_in(pattern_of(path), leaf): type(module).__name__
        for path, module in small.named_modules()
        if is_norm(module) and not is_batch_norm(module) and subtracts_mean(module)
        for leaf, _ in module.named_parameters(recurse=False)
    }
    faults: dict[str, Fault] = {}
    for name, shape in base.shapes.items():
        if pattern_of(name) in centred and len(shape) == 1 and wide.shapes[name][0] % shape[0]:
            where, kind = pattern_of(name).rpartition(".")[0], centred[pattern_of(name)]
            faults.setdefault(where, centred_fault(where, kind, shape[0], wide.shapes[name][0]))
    raise_faults("this configuration cannot grow exactly like that", list(faults.values())[:2])


@dataclass(frozen=True)
class Width:
    """The last step: how much wider a model becomes, in which class, with what the user declared about it."""

    goal: Goal
    export: str | None = None
    declared: Declarations = field(default_factory=Declarations)

    def end(self, start: End) -> End:
        """The wide configuration and its class; refused where a width cannot grow like that."""
        return End(*wide_of(start.config, self.goal, self.export, start.cls))

    def lifted(
        self, start: End, source: tuple[Plan, Powers], base: Tensors, wide: Tensors
    ) -> tuple[Plan, Powers]:
        """The plan of the width, and the powers in its folds, from those that were found at other sizes."""
        growing = growing_sizes(base.shapes, wide.shapes)
        layouts = declared_layouts(as_data(start.config), self.goal, growing, self.declared)
        return lift(source[0], base, wide, layouts, source[1])


def try_other_size(found: Found, small: Config, goal: Goal, cls: Any) -> float:
    """The worst gradient error of the plan at another share of zeros; raises if it is not exact there."""
    wide, wide_cls = wide_of(small, goal, None, cls)
    ends = Tensors.of(on_meta(small, cls)), Tensors.of(on_meta(wide, wide_cls))
    plan, _ = lift(found.plan, *ends, None, found.powers)
    done = trial(End(small, cls), End(wide, wide_cls), lambda *_: plan).measured()
    if not done.exact:
        what = (
            f"exact at one share of zeros and off by {done.most:.1e} at another: its fold depends on the size"
        )
        raise_faults(
            "this model cannot grow by zeros",
            [Fault("family.fold_depends_on_size", done.where, what, "write whole multiples: -k 2")],
        )
    return done.worst


def width_part(plan: Plan) -> Plan:
    """The last part of a plan that gave a model rows, blocks or experts and then made it wider: its width alone."""
    return replace(
        plan,
        tensors={
            name: replace(
                without_experts(without_rows(entry)),
                sources=() if entry.kind == "buffer" and not entry.sources else (name,),
                axes=tuple(
                    Axis.fixed(a.wide) if dim == entry.stack else a
                    for dim, a in enumerate(without_experts(without_rows(entry)).axes)
                ),
                cat=None,
                stack=None,
                fold=entry.fold * Scale.of(entry.spread),  # only biases that new blocks share are spread
                spread=Fraction(1),
                like=None,
                quiet=False,
                fill="own" if entry.fill == "own" else "zero",
            )
            for name, entry in plan.tensors.items()
        },
    )

"""Zeros in stock models: which norms refuse them, and a second trial at another size.

Some folds depend on how much of an axis is filled, and the full model fills another share than its small copy. So the
plan of the copy is tried at a second share, by the same rule that brings it to the full size. A fold that was right by
chance fails there.
"""

from __future__ import annotations

from typing import Any

from ..errors import Fault, raise_faults
from ..models.kinds import is_batch_norm, is_norm
from ..models.names import name_in, pattern_of
from ..planning.facts.padded_norms import centred_fault, subtracts_mean
from ..planning.search.search import Found
from .copy.trial import End, trial
from .export import wide_of
from .goal import Goal
from .lift import Tensors, lift
from .models import Config, on_meta


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

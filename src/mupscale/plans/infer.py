"""Infer a plan from two models: what grows, and, given a loss, how it is laid out.

Without a loss only what modules say for themselves is used, and everything else must be declared. With
a loss, a short list of hypotheses is tried on the two models in float64 and the gradient identity
decides; a plan that passes is exact for these models, and one that does not is never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..errors import Fault, MupscaleError, raise_faults
from ..rules.scale import Exact, Scale
from .build import build
from .declare import Declared, LayoutSpec, RoleSpec, declare
from .draft import Draft, draft
from .fits import check_duplicates
from .float64 import lifted_casts, prepare
from .hypotheses import Knob, combinations_of, copies, layout_knobs, readout_knobs, role_knobs
from .modules import KNOWN_NORMS, maps_zero_elsewhere
from .names import pattern_of
from .plan import Plan
from .readers import reader_knobs, reading_faults
from .selftest import GRADIENT_TOLERANCE, LOSS_FLOOR, Loss, compare_gradients, gradients, load_wide_

_MIXES_CHANNELS = (
    nn.LocalResponseNorm, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Unflatten,
    nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.GLU,
)  # fmt: skip

TRIALS = 400
FLIPS = 3


def infer_plan(
    make: Callable[[Any], nn.Module] | nn.Module,
    base: Any,
    wide: Any = None,
    *,
    loss: Loss | None = None,
    roles: Mapping[str, RoleSpec] | None = None,
    layouts: Mapping[str, LayoutSpec] | None = None,
    folds: Mapping[str, Exact] | None = None,
    plus_one: Sequence[str] = (),
    pad: bool = False,
) -> Plan:
    """The plan that takes `make(base)` to `make(wide)`, or, given two modules, the first to the second.

    Axes that differ in size grow. `roles`, `layouts`, `folds` and `plus_one` declare what cannot be
    inferred, by name pattern. `pad=True` allows sizes that are no whole multiple: k·n + p with zeros.

    >>> plan = infer_plan(lambda n: nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2)), 4, 8)
    >>> {name: str(tensor.change.s) for name, tensor in plan.items()}
    {'0.weight': '1', '0.bias': '1', '2.weight': '1/2', '2.bias': '1'}
    """
    declared = Declared(roles or {}, layouts or {}, folds or {}, plus_one)
    if isinstance(make, nn.Module):
        if not isinstance(base, nn.Module):
            raise MupscaleError("infer_plan takes a factory and two sizes, or two modules")
        models, again = (make, base), None
    else:
        if wide is None:
            raise MupscaleError(
                "infer_plan takes a factory and two sizes, or two modules; the wide size is missing"
            )
        factory = make
        models = (build(lambda: factory(base), seed=0), build(lambda: factory(wide), seed=0))
        again = build(lambda: factory(base), seed=1)
    made, faults = draft(*models, pad, again)
    made, unused = declare(made, declared)
    copied = {name for name, entry in made.entries.items() if entry.kind == "buffer" and entry.layouts}
    faults = [fault for fault in faults if fault.where not in copied] + unused
    raise_faults("these two models cannot be planned", faults)
    if loss is None:
        raise_faults("a plan needs more than the shapes of these two models", _undecided(made))
        return made.plan()
    if not isinstance(make, nn.Module):
        with torch.random.fork_rng():
            models = (make(base), models[1])
    with lifted_casts():
        return _search(made, *prepare(*models), loss)


def _undecided(made: Draft) -> list[Fault]:
    """Everything that shapes leave open, with the line to write."""
    hint = "or pass loss=, and the gradient identity decides"
    faults = []
    for name in dict.fromkeys(pattern_of(entry.name) for entry in made.open):
        faults.append(
            Fault(
                name,
                "no known module says whether its growing axis is summed over",
                f'declare roles={{"{name}": "out"}} or "in", {hint}',
            )
        )
    folds = [e.declared_fold for e in made.entries.values() if e.declared_fold is not None]
    for name, reader in made.conflicts.items():
        inverse = Scale.of(copies(made, made.entries[name], made.entries[name].growing[-1])) ** -1
        if made.entries[name].declared_fold is not None or inverse in folds:
            continue
        faults.append(
            Fault(
                f"{name} = {reader}",
                "a tied readout sums over the width, and its input use does not: 1/k must go somewhere",
                f'declare folds={{"<last norm>.*": "{inverse}"}}, or folds={{"{name}": 1}} if the model divides by its width, {hint}',
            )
        )
    faults += reading_faults(made, hint)
    for path, module in made.models[0].named_modules():
        if isinstance(module, _MIXES_CHANNELS):
            what = f"{type(module).__name__} mixes channels in a way that shapes do not show"
            faults.append(Fault(path, what, f"remove it, {hint}"))
    faults += _undecided_pads(made, hint)
    decided = {(e.name, d) for e in made.entries.values() for d in e.layouts}
    for knob in layout_knobs(made):
        axes = [(n, d) for n, dims in knob[0].layouts.items() for d in dims] if knob else []
        if axes and not all(axis in decided for axis in axes):
            name, dim = axes[0]
            blocks = [next(iter(s.layouts[name].values())) for s in knob]
            faults.append(
                Fault(
                    f"{pattern_of(name)}, axis {dim}",
                    f"undeclared layout: a number of heads or groups grows, so its copies may be neighbours or blocks (of {', '.join(map(str, blocks))})",
                    f'declare layouts={{"{pattern_of(name)}": {{{dim}: {blocks[0]}}}}}, {hint}',
                )
            )
    return faults


def _undecided_pads(made: Draft, hint: str) -> list[Fault]:
    """Zeros pass through activations that map 0 to 0 and through torch's own RMSNorm; the rest is tested."""
    if not made.pad or not any(t.padded for t in made.plan().tensors.values()):
        return []
    faults = []
    for path, module in made.models[0].named_modules():
        name = type(module).__name__
        if maps_zero_elsewhere(module):
            faults.append(
                Fault(
                    path,
                    f"{name} does not map 0 to 0, so padding may leak through it",
                    f"use whole multiples, {hint}",
                )
            )
        elif "norm" in name.lower() and not isinstance(module, KNOWN_NORMS):
            faults.append(
                Fault(
                    path,
                    f"{name} is not one of torch's norms, so what padding asks of it is not known",
                    f"use whole multiples, {hint}",
                )
            )
    return faults


def _norms_in_order(base: nn.Module, loss: Loss) -> list[str]:
    order: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: order.append(name))
        for name, module in base.named_modules()
        if "norm" in type(module).__name__.lower() and list(module.parameters(recurse=False))
    ]
    try:
        gradients(base, loss)
    finally:
        for handle in handles:
            handle.remove()
    return order


def _search(made: Draft, base: nn.Module, wide: nn.Module, loss: Loss) -> Plan:
    value, base_grads = gradients(base, loss)
    norms = _norms_in_order(base, loss) if made.conflicts else []
    layouts = list(layout_knobs(made))
    decided = {
        (name, dim) for knob in layouts for s in knob for name, dims in s.layouts.items() for dim in dims
    }
    proposed = (*role_knobs(made), *layouts, *reader_knobs(made, decided), *readout_knobs(made, norms))
    knobs = [knob for knob in proposed if knob]
    nearest: tuple[int, float, str] = (2, 0.0, "no hypothesis could be built")
    tried = 0
    for settings in islice(combinations_of(knobs, FLIPS), TRIALS):
        trial = made
        for setting in settings:
            trial = setting.apply(trial)
        try:
            plan = trial.plan()
        except MupscaleError as error:
            if not knobs:
                raise
            nearest = min(nearest, (2, 0.0, str(error)))
            continue
        check_duplicates(plan)
        tried += 1
        _apply_edits(wide, plan)
        load_wide_(wide, base, plan)
        found, wide_grads = gradients(wide, loss)
        gap = float((found - value).abs() / value.abs().clamp_min(LOSS_FLOOR))
        if not gap <= GRADIENT_TOLERANCE:
            nearest = min(nearest, (1, gap, f"the loss differs by {gap:.1e}"))
            continue
        identity = compare_gradients(base_grads, wide_grads, plan)
        name, worst = identity.worst
        if worst <= GRADIENT_TOLERANCE:
            _refuse_undecided(knobs, set(identity.errors) - set(identity.untested))
            return replace(plan, needs=plan.needs | _taken_for_granted(made, plan))
        nearest = min(nearest, (0, worst, f"the loss agrees, the gradient of {name} is off by {worst:.1e}"))
    raise _not_found(made, tried, nearest[2])


def _taken_for_granted(made: Draft, plan: Plan) -> set[str]:
    """Raw matrices whose axes grow alike: training cannot tell in from out, sizes of noise can."""
    alike = [
        e.name for e in made.open if len({plan[e.name].axes[d].k for d in e.growing}) == 1 < len(e.growing)
    ]
    return {
        f"{name} reads its last growing axis (both grow alike, so training does not tell; declare roles= before adding noise)"
        for name in dict.fromkeys(map(pattern_of, alike))
    }


def _not_found(made: Draft, tried: int, nearest: str) -> MupscaleError:
    faults = [
        Fault(
            f"{tried} hypotheses tried",
            f"none passes the gradient identity; nearest: {nearest}",
            "declare roles=, layouts= or folds=, or look for a width in the model's code (1/sqrt(d), dropout, a table)",
        )
    ]
    for name, reader in made.conflicts.items():
        if made.entries[name].declared_fold is None:
            faults.append(
                Fault(
                    f"{name} = {reader}",
                    "a tied readout with nowhere to fold 1/k: no norm with a gain before it passed",
                    'divide the logits by the width in the model, or untie, or declare folds={"<tensor>": "1/k"}',
                )
            )
    return MupscaleError("no exact plan was found for these two models", faults)


def _refuse_undecided(knobs: list[Knob], tested: set[str]) -> None:
    """A hypothesis that only concerns tensors without a gradient passes whatever it says."""
    faults = []
    for knob in knobs:
        names = {name for setting in knob for name in (*setting.roles, *setting.layouts)}
        if len(knob) > 1 and names and not names & tested:
            what = "its gradient is zero, so every hypothesis passes: the loss does not reach it"
            faults.append(
                Fault(
                    ", ".join(sorted(names)),
                    what,
                    f'use a loss that does, or declare roles={{"{min(names)}": "out"}} or "in", and its layouts=',
                )
            )
    raise_faults("the loss does not decide every tensor", faults)


def _apply_edits(wide: nn.Module, plan: Plan) -> None:
    for edit in plan.edits:
        path, _, leaf = edit.path.rpartition(".")
        setattr(wide.get_submodule(path), leaf, edit.new)

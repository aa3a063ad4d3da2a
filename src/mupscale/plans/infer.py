"""Infer a plan from two models: what grows, and, given a loss, how it is laid out.

Without a loss only what modules say for themselves is used, and everything else must be declared. With
a loss, a short list of hypotheses is tried on the two models in float64 and the gradient identity
decides; a plan that passes is exact for these models, and one that does not is never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Fault, MupscaleError, raise_faults
from ..rules.axes import Axis
from ..rules.scale import Exact
from .build import build
from .declare import Declared, LayoutSpec, RoleSpec, declare
from .draft import Draft, draft
from .hypotheses import Knob, combinations_of, layout_knobs, readout_knobs, role_knobs
from .names import pattern_of
from .plan import Plan
from .readers import reader_knobs, reading_faults
from .selftest import GRADIENT_TOLERANCE, Loss, compare_gradients, gradients, load_wide_

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
    return _search(made, *_prepare(*models), loss)


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
    for name, reader in made.conflicts.items():
        if made.entries[name].settled or any(e.settled and not e.fold.is_one for e in made.entries.values()):
            continue
        faults.append(
            Fault(
                f"{name} = {reader}",
                "a tied readout sums over the width, and its input use does not: 1/k must go somewhere",
                f'declare folds={{"<last norm>.*": "1/k"}}, or folds={{"{name}": 1}} if the model divides by its width, {hint}',
            )
        )
    faults += reading_faults(made, hint)
    for path, module in made.models[0].named_modules():
        if isinstance(module, nn.LocalResponseNorm):
            faults.append(
                Fault(
                    path,
                    "LocalResponseNorm mixes a fixed number of neighbouring channels",
                    f"remove it, {hint}",
                )
            )
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


def _prepare(base: nn.Module, wide: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two float64 models to try hypotheses on: the base at random weights, the wide one empty."""
    import copy

    if any(p.is_meta for p in base.parameters()):
        raise MupscaleError("a loss needs a base model with weights, found parameters on the meta device")
    base = copy.deepcopy(base).double().cpu()
    wide = copy.deepcopy(wide)
    for parameter in list(wide.parameters()):
        if parameter.is_meta:
            _replace(wide, parameter, nn.Parameter(torch.zeros(parameter.shape), parameter.requires_grad))
    wide = wide.double().cpu()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in base.parameters():
            size = float(parameter.std(correction=0)) if parameter.numel() > 1 else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.3 * (size or 1.0))
    for model in (base, wide):
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        cast_inputs(model, torch.float64)
    return base, wide


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                setattr(module, name, new)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> Any:
    """Let a model of another dtype take the caller's batches: floating inputs are cast on entry."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(map(cast, value))
        return {k: cast(v) for k, v in value.items()} if type(value) is dict else value

    return model.register_forward_pre_hook(
        lambda module, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True
    )


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
        _refuse_fractions(plan)
        tried += 1
        _apply_edits(wide, plan)
        load_wide_(wide, base, plan)
        found, wide_grads = gradients(wide, loss)
        gap = float((found - value).abs() / value.abs().clamp_min(1e-30))
        if not gap <= GRADIENT_TOLERANCE:
            nearest = min(nearest, (1, gap, f"the loss differs by {gap:.1e}"))
            continue
        identity = compare_gradients(base_grads, wide_grads, plan)
        name, worst = identity.worst
        if worst <= GRADIENT_TOLERANCE:
            _refuse_undecided(made, knobs, identity.untested)
            return plan
        nearest = min(nearest, (0, worst, f"the loss agrees, the gradient of {name} is off by {worst:.1e}"))
    raise _not_found(made, tried, nearest[2])


def _not_found(made: Draft, tried: int, nearest: str) -> MupscaleError:
    faults = [
        Fault(
            f"{tried} hypotheses tried",
            f"none passes the gradient identity; nearest: {nearest}",
            "declare roles=, layouts= or folds=, or look for a width in the model's code (1/sqrt(d), dropout, a table)",
        )
    ]
    for name, reader in made.conflicts.items():
        if not made.entries[name].settled:
            faults.append(
                Fault(
                    f"{name} = {reader}",
                    "a tied readout with nowhere to fold 1/k: no norm with a gain before it passed",
                    'divide the logits by the width in the model, or untie, or declare folds={"<tensor>": "1/k"}',
                )
            )
    return MupscaleError("no exact plan was found for these two models", faults)


def _refuse_undecided(made: Draft, knobs: list[Knob], untested: Sequence[str]) -> None:
    turned = {name for knob in knobs if len(knob) > 1 for s in knob for name in (*s.roles, *s.layouts)}
    blind = [name for name in untested if name in turned and made.entries[name].roles is None]
    raise_faults(
        "the loss does not decide every tensor",
        [
            Fault(
                n,
                "its gradient is zero, so every hypothesis passes",
                f'declare roles={{"{n}": "out"}} or "in"',
            )
            for n in blind
        ],
    )


def _refuse_fractions(plan: Plan) -> None:
    faults = [
        Fault(f"{name}, axis {dim}", fraction_fault(axis))
        for name, t in plan.items()
        for dim, axis in enumerate(t.axes)
        if not axis.duplicates
    ]
    raise_faults("copies come in whole numbers", faults)


def fraction_fault(axis: Axis) -> str:
    k = max(int(axis.k), 1)
    return (
        f"grows from {axis.base} to {axis.wide}, which is not a whole number of copies; nearest: "
        f"{axis.base * k} (x{k}), {axis.base * (k + 1)} (x{k + 1}); or pad with zeros (pad=True)"
    )


def _apply_edits(wide: nn.Module, plan: Plan) -> None:
    for edit in plan.edits:
        path, _, leaf = edit.path.rpartition(".")
        setattr(wide.get_submodule(path), leaf, edit.new)

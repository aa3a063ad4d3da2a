"""What hangs on a run and is neither weight nor state: what of it the wide run has, what it has not, and what is warned of.

A row is warned of if training changes by it. What was measured and did not show, a hook that only looks on for example, is
in the provenance and nowhere else.

| what | fate |
|---|---|
| gradients of micro-batches that were not stepped yet | carried |
| hooks on gradients of parameters | carried, or refused (`plans/gradient_hooks.py`) |
| state of modules: counters, dicts, arrays, generators; marks of parameters | carried (`plans/attributes.py`) |
| state as long as the width in a tensor that is no buffer | measured by the proof, named; refused without one |
| gradient checkpointing of transformers | carried; named if its function is the user's own |
| settings that the factory of the wide model sets | the factory's, warned of |
| hooks and patched methods of modules | measured by the proof, named; warned of without one |
| step hooks and patched methods of optimizers | warned of |
| a scheduler that is not part of the run | warned of |
| bits of 16-bit weights that a factor such as 2^(1/2) rounds off | warned of |
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.class_code import of_library
from ...models.clone import hooks_of
from ...models.names import named_tensors
from ...optimizers.schedulers import driven_by
from ...plans.attributes import CHECKPOINTING, both_values, compare_attributes
from ...plans.direction import Direction
from ...plans.tensor_plan import TensorPlan
from ...rules.axes import Axis
from ...runs.run import Run
from ...tensors.making import Making
from ..units.clip import Clip
from ..units.stepping import InUnits


class Left(NamedTuple):
    """One thing that the wide run does not have from the base."""

    where: str
    what: str
    warned: bool
    """Whether training changes by it, as far as is known."""
    remedy: str = ""


def hand_over_(
    base: Run, wide: Run, direction: Direction, proof: Mapping[str, Any], new_rate: bool = False
) -> dict[str, Any]:
    """Give the wide run the base's gradients, and say what it has and has not; warns once, of what changes training.

    `proof` is the record of what was measured: hooks and patched methods among it, if there is a number. `new_rate` says
    that the caller sets a learning rate, so a scheduler that is left out is not missed. Returns what the provenance records.
    """
    rows = list(_attributes(base.model, wide.model, direction, "worst" in proof))
    rows += _carry_gradients_(base, wide, direction)
    rows += _rounded_off(wide.model, direction)
    if _checkpointed(base.model) and not _checkpointed(wide.model):
        what = "on in the base and off in the wide model, which changes memory and speed alone"
        rows.append(Left(CHECKPOINTING, what, False))
    for number, optimizer in enumerate(base.optimizers):
        where = "optimizer" if len(base.optimizers) == 1 else f"optimizers[{number}]"
        rows += _of_optimizer(where, optimizer, base, new_rate)
    lines = [f"\n  {row.where}: {row.what}{row.remedy and '; '}{row.remedy}" for row in rows if row.warned]
    if lines:
        warnings.warn(
            f"training changes by what the wide run does not have from the base{''.join(lines)}", stacklevel=3
        )
    gradients = sum(p.grad is not None for p in wide.model.parameters())
    checkpoints = _checkpointed(wide.model) if _checkpointed(base.model) else 0
    counts = {name: sum(map(len, hooks_of(tensor))) for name, _, tensor in named_tensors(wide.model)}
    hooks = {f"{name}.hooks": count for name, count in counts.items() if count}
    return {
        "proof": {key: value for key, value in proof.items() if key != "carried"},
        "carried": {
            **proof.get("carried", {}),
            **({"gradients": gradients} if gradients else {}),
            **({CHECKPOINTING: checkpoints} if checkpoints else {}),
            **hooks,
        },
        "named": {row.where: row.what for row in rows},
    }


def _rounded_off(wide: nn.Module, direction: Direction) -> Iterator[Left]:
    """A row if weights of 16 bits are multiplied by an irrational factor, which rounds every one of them.

    RMSNorm over 64 channels and 64 zeros divides by 2^(-1/2) of what it did, and what writes these channels makes up for it.
    """
    rounded = {}
    for name, kind, tensor in named_tensors(wide):
        scale = direction.planned(name)[1].change.s
        irrational = any(exponent.denominator != 1 for _, exponent in scale.powers)
        if kind == "parameter" and irrational and tensor.dtype in (torch.bfloat16, torch.float16):
            kind_of_float = str(tensor.dtype).removeprefix("torch.")
            rounded[name] = f"multiplied by {scale} in {kind_of_float}, which rounds every entry"
    if rounded:
        where, what = next(iter(rounded.items()))
        many = f"{where} and {len(rounded) - 1} more" if len(rounded) > 1 else where
        yield Left(many, what, True, "grow a float32 copy of the base, or to 4 times the width")


def _carry_gradients_(base: Run, wide: Run, direction: Direction) -> Iterator[Left]:
    """Give the wide parameters r · dup(G) of gradients that the base has accumulated and not stepped with."""
    held = {n: t.grad for n, k, t in named_tensors(base.model) if k == "parameter" and t.grad is not None}
    for name, kind, parameter in named_tensors(wide.model):
        if kind != "parameter" or parameter.grad is not None:
            continue
        planned, entry = direction.planned(name)
        sources = (planned,) if direction.back else entry.sources
        known = {source: held[source] for source in sources if source in held}
        if not known or len(known) < len(sources):
            continue
        value = known[planned] if direction.back else known[sources[0]]
        if not value.is_sparse:
            value = value if direction.back else entry.source(known)
            parameter.grad = direction.made(value, entry.gradient_making())
        elif entry.axes[0].grows or len(sources) > 1:
            yield Left(f"{name}.grad", "a sparse gradient of rows that grow, which is not carried", False)
        else:
            parameter.grad = _sparse(value.coalesce(), parameter, direction, entry)


def _sparse(value: Tensor, like: Tensor, direction: Direction, entry: TensorPlan) -> Tensor | None:
    """A sparse gradient, whose rows stay; they are there even if they are zero, because an optimizer moves them."""
    rows = value.values()
    if not len(rows):
        return None
    made = direction.made(rows, Making((Axis.fixed(len(rows)), *entry.axes[1:]), entry.change.r))
    return torch.sparse_coo_tensor(
        value.indices(), made, like.shape, is_coalesced=True, check_invariants=False
    )


def _checkpointed(model: nn.Module) -> int:
    """How many modules compute their forward again in the backward, by the flag of transformers."""
    return sum(bool(vars(module).get(CHECKPOINTING)) for module in model.modules())


def step_hooks(optimizer: Optimizer) -> int:
    """How many step hooks an optimizer has that are not ours."""
    pairs = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    owners = [getattr(hook, "__self__", hook) for hooks in pairs for hook in hooks.values()]
    return sum(not isinstance(owner, (Clip, InUnits)) for owner in owners)


def patched_methods(optimizer: Optimizer) -> list[str]:
    """Methods of its class that were replaced on this object.

    torch's schedulers wrap `step` to count its calls, which is no patch; what they wrap may be one.
    """
    found = []
    for name, value in vars(optimizer).items():
        own = getattr(type(optimizer), name, None)
        while callable(own) and of_library(value) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
            if getattr(value, "__func__", value) is own:
                break
        if callable(own) and not of_library(value) and getattr(value, "__func__", value) is not own:
            found.append(name)
    return found


def _attributes(base: nn.Module, wide: nn.Module, direction: Direction, proved: bool) -> Iterator[Left]:
    # A proof is measured with the factory's settings, and sees what they change, but for dropout, which it switches off.
    seen = proved and not any(need.kind == "dropout" for need in direction.plan.needs)
    for difference in compare_attributes(base, wide, None if direction.back else direction.plan):
        if difference.kind != "expected":
            code = difference.kind == "refused" and not proved
            yield Left(difference.path, both_values(difference), code or (difference.matters and not seen))


def _of_optimizer(where: str, optimizer: Optimizer, run: Run, new_rate: bool) -> Iterator[Left]:
    again = "on the wide run's optimizer"
    if count := step_hooks(optimizer):
        yield Left(f"{where}, step hooks", f"{count} are not carried", True, f"register them {again}")
    for name in patched_methods(optimizer):
        what = "it was replaced on this object, which is not carried"
        yield Left(f"{where}.{name}", what, True, f"replace it {again}")
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled and not any(driven_by(scheduler) is optimizer for scheduler in run.schedulers):
        what = "a scheduler has driven it, which is not part of the run, so its rates stay as they are"
        remedy = f"write mu.Run(model, optimizer, scheduler), or build a new scheduler {again}"
        yield Left(f"{where}, scheduler", what, not new_rate, remedy)

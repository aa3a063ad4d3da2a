"""A Lightning checkpoint at the wide end: weights and optimizer state, each in their units, everything else as it was.

Works in memory, the whole file at once, and reads it with `weights_only=True`. Groups and schedulers keep the
reference constants, so `trainer.fit(ckpt_path=...)` loads the result; `LightningCallback` then trains it in units.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import Fault, MupscaleError
from ...files.pickles.torch_file import map_leaves, read_tree
from ...files.strict import os_errors, printable, raise_few
from ...noise.kinds import Noise
from ...noise.resolve import resolve_noise, unused_seed
from ...noise.resolved import NoisePlan
from ...optimizers.carry import carry_optimizer, made
from ...optimizers.identify import identify
from ...optimizers.positions import CLAIM, named_orders
from ...optimizers.read import Names, parts, read_positions
from ...optimizers.write import write_positions
from ...plans.direction import Direction
from ...plans.ends import expect_exact
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...runs.growth_record import KEY, plans_in, record_in, record_of
from ...runs.provenance import Growth, Provenance
from ...tensors.noise import TensorNoise
from ...training.grow.state_dicts import carry_tensors

_WEIGHTS, _STATES = "state_dict", "optimizer_states"


def grow_lightning_checkpoint(
    base: Path | str,
    out: Path | str,
    *,
    plan: Plan,
    noise: Noise | None = None,
    seed: int = 0,
    optimizer_classes: Sequence[str | None] | str | None = None,
    prefix: str | None = None,
    names: Sequence[Names] | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> None:
    """Write the checkpoint from which `trainer.fit(wide_model, ckpt_path=out)` continues.

    With a plan by new units, `mu.infer_plan(base, wide, by="units", loss=loss)`, and `noise=mu.NewUnits()` it is what `mu.upscale`
    makes, to the bit with the same seed.

    Args:
        base: The checkpoint that Lightning wrote.
        out: The file to write.
        plan: The plan from the base to the wide model.
        noise: What parts copies or wakes new units. Without it the result trains exactly like the base.
        seed: The number on which the noise depends.
        optimizer_classes: The full name of each optimizer's class, or None where what it keeps tells. One name stands for all.
        prefix: What the LightningModule puts before the plan's names. By default the one under which the file has all parameters of
            the plan; `self.model = …` gives "model.".
        names: For every optimizer its parameters' names, group by group. Needed unless it was made from `self.parameters()` or
            from named parameters.
        prove: False grows by a plan that nothing has proved.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Raises:
        MupscaleError: If it is no such checkpoint, the plan is not proved, or something cannot be carried.

    >>> import tempfile, mupscale as mu
    >>> plan, base = mu.plans.plan_between(lambda n: torch.nn.Linear(n, n), 2, 4), torch.nn.Linear(2, 2)
    >>> saved = {f"model.{name}": tensor for name, tensor in base.state_dict().items()}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": saved, "optimizer_states": []}, f"{folder}/base.ckpt")
    ...     grow_lightning_checkpoint(f"{folder}/base.ckpt", f"{folder}/wide.ckpt", plan=plan)
    ...     torch.load(f"{folder}/wide.ckpt")["state_dict"]["model.weight"].shape
    torch.Size([4, 4])
    """
    path, out = Path(base), Path(out)
    described = read_tree(path)  # checks the archive, without loading a tensor
    if not isinstance(described, dict) or not {_WEIGHTS, _STATES} <= described.keys():
        raise MupscaleError(
            f"{printable(str(path))} is not a checkpoint of a training run; expected {_WEIGHTS} and {_STATES}",
            code="lightning.not_a_checkpoint",
        )
    early, history = None, Provenance()
    if KEY in described:
        early, history = plans_in(path)[1], Provenance.from_json(record_in(path))
    expect_exact(plan, prove, noise)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    raise_few(f"{printable(str(path))} cannot be widened", _unknown_tensors(checkpoint))
    weights = checkpoint[_WEIGHTS]
    before = _prefix(weights, plan) if prefix is None else prefix
    whole = plan.rename(lambda name: before + name)
    direction, noise_settings = Direction(whole), {}
    if noise is not None:
        own = {name.removeprefix(before): t for name, t in weights.items() if name.startswith(before)}
        found = resolve_noise(
            own, noise, plan=plan, seed=unused_seed(seed, early, history.seeds), since=early
        )
        direction = Direction(whole, noise=_Prefixed(found, before))
        noise_settings = {"noise": {"kind": type(noise).__name__, **found.as_json()}, "seed": seed}
    wide = {**checkpoint, _WEIGHTS: carry_tensors(weights, direction), _STATES: []}
    classes = _for_each(optimizer_classes, checkpoint[_STATES], "optimizer_classes")
    every = _for_each(names, checkpoint[_STATES], "names")
    for i, (state, name, own) in enumerate(zip(checkpoint[_STATES], classes, every, strict=True)):
        members = named_parameters(weights, whole) if own is None else own
        rule = None if name is None else rule_for(str(name), rules=rules)
        wide[_STATES].append(_widened(state, direction, members, rule, f"optimizer {i}", rules))
    since = plan if early is None else early.then(plan)
    wide[KEY] = record_of((plan, since), history.grown(Growth.by(plan, early, **noise_settings)))
    partial = out.with_name(f"{out.name}.partial")
    with os_errors(out):
        torch.save(wide, partial)
        os.replace(partial, out)


def _for_each(given: Sequence[Any] | str | None, states: Sequence[Any], where: str) -> list[Any]:
    """What was given for each optimizer: a list as it is, and one name or nothing for all of them.

    >>> _for_each("torch.optim.SGD", [{}, {}], "optimizer_classes"), _for_each(None, [{}], "names")
    (['torch.optim.SGD', 'torch.optim.SGD'], [None])
    """
    if given is None or isinstance(given, str):
        return [given] * len(states)
    if len(given) != len(states):
        what = f"{len(given)} for {len(states)} optimizers in the checkpoint"
        remedy = "list one for each optimizer, in the order in which configure_optimizers returns them"
        fault = Fault("lightning.other_number_of_optimizers", where, what, remedy)
        raise MupscaleError("this checkpoint cannot be widened", [fault])
    return list(given)


def _prefix(weights: Mapping[str, Tensor], plan: Plan) -> str:
    """What stands before the plan's names; that of `self.model` where no other one is the only one that fits.

    >>> plan = Plan({"w": TensorPlan(("w",), ())})
    >>> one = torch.zeros(())
    >>> _prefix({"net.w": one, "loss.scale": one}, plan), _prefix({"net.w": one, "ema.w": one}, plan)
    ('net.', 'model.')
    """
    names = {s for entry in plan.tensors.values() if entry.kind == "parameter" for s in entry.sources}
    ends = {key.removesuffix(name) for name in names for key in weights if f".{key}".endswith(f".{name}")}
    fitting = [end for end in ends if all(end + name in weights for name in names)]
    return fitting[0] if len(fitting) == 1 else "model."


@dataclass(frozen=True)
class _Prefixed:
    """Noise under the names of a LightningModule. Its numbers are drawn by the names of the plan, as those of a live model are."""

    noise: NoisePlan
    prefix: str

    def tensor(self, name: str) -> TensorNoise | None:
        return self.noise.tensor(name.removeprefix(self.prefix))

    def woken(self, name: str, entry: TensorPlan) -> TensorPlan:
        return self.noise.woken(name.removeprefix(self.prefix), entry)


def named_parameters(weights: Mapping[str, Tensor], plan: Plan) -> Names:
    """The parameters of a state dict in the order of `module.parameters()`, tied ones once."""
    known = {source for t in plan.tensors.values() if t.kind == "parameter" for source in t.sources}
    first: dict[str, str] = {}
    for name in weights:
        planned = plan.planned(name)
        if planned in known:
            first.setdefault(planned, name)
    return [list(first.values())]


def _widened(
    state: Any,
    direction: Direction,
    names: Names,
    rule: OptimizerRule | None,
    where: str,
    rules: Mapping[str, OptimizerRule] | None,
) -> dict[str, Any]:
    groups, states = parts(state, where)
    kept = all("param_names" in group for group in groups)
    chosen = rule if rule is not None else identify(groups, states.values(), rules)
    order, wide_order = named_orders(groups, direction.plan, None if kept else names)
    named, unread = read_positions(groups, states, order, chosen, where)
    carried, uncarried = carry_optimizer(named, direction, split=False)
    raise_few(CLAIM, unread + uncarried)
    return write_positions(made(carried, direction), groups, wide_order)


def _unknown_tensors(checkpoint: Mapping[str, Any]) -> list[Fault]:
    """Averages of weights and the like, kept by callbacks: their units are not known here."""
    faults: list[Fault] = []

    def note(where: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.dim():
            what = f"a tensor of shape {tuple(tensor.shape)}, whose units are not known"
            faults.append(
                Fault(
                    "lightning.unknown_tensor_units",
                    printable(where),
                    what,
                    "remove it from the checkpoint, and carry it yourself",
                )
            )

    for key, value in checkpoint.items():
        if key not in (_WEIGHTS, _STATES):
            map_leaves(value, f"[{key!r}]", Tensor, note)
    return faults

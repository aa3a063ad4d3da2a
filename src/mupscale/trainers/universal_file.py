"""A universal checkpoint of DeepSpeed in, a wider one out, streamed, with the state of its optimizer; and an engine that loads it.

DeepSpeed itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..checkpoints.engine_job import write_grown
from ..checkpoints.universal import weight_sources, wide_universal
from ..errors import Fault, MupscaleError, raise_faults
from ..files.universal import SETTINGS, STEP, read_settings, read_universal, tag_in
from ..jobs.job import Move
from ..noise.kinds import Noise
from ..plans.ends import expect_proved
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..storage.location import Location, location
from ..training.grow.state_dicts import groups_for


def grow_universal_checkpoint(
    base: Location | str,
    out: Location | str,
    *,
    plan: Plan,
    noise: Noise | None = None,
    seed: int = 0,
    optimizer_class: str | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, str]:
    """Write the universal checkpoint from which a wide DeepSpeed engine continues; returns what was not carried, with reasons.

    `base` is the directory that holds `latest_universal`. Weights, first and second moments are grown tensor by tensor, each in
    its units. Its groups are those that units ask for: build the wide optimizer from `universal_groups(out, model)`, and load
    with `load_universal_(engine, out)`. The optimizer is known from what it keeps, unless `optimizer_class`
    names it ("torch.optim.AdamW"). Without `noise` the result trains exactly like the base. Run it again to resume.

    >>> import tempfile, mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         grow_universal_checkpoint(folder, f"{folder}/wide", plan=plan)
    ...     except mu.MupscaleError as error:
    ...         print(error.code)
    deepspeed.not_universal
    """
    expect_proved(plan, prove)
    universal = read_universal(base)
    places = weight_sources(universal, plan)
    return write_grown(
        universal.path,
        out,
        plan,
        noise,
        seed,
        weights=[Move(name, plan[name].making(), (place,), place) for name, place in places.items()],
        make=lambda resolved: wide_universal(
            universal, plan, noise=resolved, optimizer=optimizer_class, rules=rules
        ),
    )


def universal_groups(wide: Location | str, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups of the wide model, in the order and with the settings of a grown checkpoint.

    ZeRO 1 and 2 load group by group, and leave out without a word what the engine has more groups for.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "latest_universal").write_text("step1")
    ...     Path(folder, "step1", "zero").mkdir(parents=True)
    ...     groups = [{"lr": 0.1, "param_names": ["weight"]}, {"lr": 0.2, "param_names": ["bias"]}]
    ...     torch.save({"param_groups": groups}, f"{folder}/step1/zero/optimizer_state.pt")
    ...     [group["lr"] for group in universal_groups(folder, nn.Linear(2, 2))]
    [0.1, 0.2]
    """
    return groups_for(model, _saved(wide))


def load_universal_(engine: Any, wide: Location | str) -> Any:
    """Load a grown checkpoint into a DeepSpeed engine whose optimizer has its groups; returns what the user had saved.

    `engine.load_checkpoint` alone is enough for ZeRO 1 and 2, with the right groups. In ZeRO 3 it leaves every group the
    settings of the first and one tensor that counts steps for all: here each gets its own.

    >>> import mupscale as mu
    >>> try:
    ...     load_universal_(nn.Linear(2, 2), "./wide")
    ... except mu.MupscaleError as error:
    ...     print(error.code)
    deepspeed.not_an_engine
    """
    if not hasattr(engine, "load_universal_checkpoint"):
        what = f"a {type(engine).__name__}, expected what deepspeed.initialize returns first"
        raise MupscaleError(
            "this is not a DeepSpeed engine",
            [Fault("deepspeed.not_an_engine", "engine", what, "write load_universal_(engine, wide)")],
        )
    inner, saved = engine.optimizer.optimizer, _saved(wide)["param_groups"]
    faults = []
    if not engine.load_universal_checkpoint():
        what = "its config does not say that the checkpoint is a universal one"
        faults.append(
            Fault(
                "deepspeed.universal_not_enabled",
                "engine",
                what,
                'write "checkpoint": {"load_universal": true} into it',
            )
        )
    if [g.get("param_names") for g in inner.param_groups] != [g["param_names"] for g in saved]:
        what = f"it has {len(inner.param_groups)} groups, which are not the {len(saved)} of the checkpoint"
        remedy = "build its optimizer from mu.trainers.universal_groups(wide, model)"
        faults.append(Fault("deepspeed.groups_differ", type(inner).__name__, what, remedy))
    raise_faults("this engine cannot load the checkpoint", faults)
    _, kept = engine.load_checkpoint(str(wide))
    for group, settings in zip(inner.param_groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    for state in inner.state.values():
        if isinstance(state.get(STEP), torch.Tensor):
            state[STEP] = state[STEP].clone()
    return kept


def _saved(directory: Location | str) -> dict[str, Any]:
    """The groups of a checkpoint that was written here, which holds plain values only."""
    folder = location(directory)
    read: dict[str, Any] = read_settings(folder / tag_in(folder) / "zero" / SETTINGS)
    return read

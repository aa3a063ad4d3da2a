"""Plans for torchtitan's models: layouts read off their attention modules, and measured on a small pair of configs.

Reads configs and modules by their attributes, and imports nothing of torchtitan.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..errors import Fault, raise_faults
from ..models.example_loss import ExampleInputs
from ..planning.declare import Declared, sound
from ..planning.heads import other_heads
from ..planning.infer import infer_plan
from ..plans.plan import Plan

_ONE_FACTOR = "keep both, and multiply n_heads and n_kv_heads by one factor"


def titan_plan(
    base: Any,
    wide: Any,
    *,
    small: tuple[Any, Any] | None = None,
    declared: Declared | None = None,
) -> Plan:
    """Plan the growth between two model configs of torchtitan, on the meta device: heads grow, their size and grouping stay.

    Layouts are read off the attention modules, for models of any size.

    Args:
        base: The config of the base.
        wide: The config of the wide model.
        small: A narrow and a wide config of the same kind of model, small enough to run. They prove what was read off: the same
            declarations are measured on them.
        declared: What cannot be read off.

    Returns:
        The plan; proved if `small` is given.

    Raises:
        MupscaleError: If something can neither be read off nor is declared, or the small pair grows by another plan.

    >>> from types import SimpleNamespace
    >>> make = lambda n: nn.Sequential(nn.Embedding(9, n), nn.RMSNorm(n), nn.Linear(n, 9))
    >>> config = lambda n: SimpleNamespace(dim=n, build=lambda: make(n))
    >>> str(titan_plan(config(4), config(8))["2.weight"].change.s)
    '1/2'
    """
    with torch.device("meta"):
        models = base.build(), wide.build()
    checked = sound(declared)
    plan = _read_off(base, wide, models, checked)
    if small is None:
        return plan
    copies = _initialised(small[0]), _initialised(small[1])
    embedding = dict(copies[0].named_parameters())["tok_embeddings.weight"]
    tokens = torch.arange(32, device=embedding.device).view(2, 16) * 7 % len(embedding)
    read, measured = (_read_off(*small, copies, checked, inputs) for inputs in (None, (tokens,)))
    others = [name for name, tensor in measured.tensors.items() if tensor != read[name]]
    what = "the small pair grows exactly by another plan than the one that was read off"
    raise_faults(
        "these two configs cannot be planned",
        [
            Fault(
                "torchtitan.other_plan_measured",
                n,
                f"{what}: s = {measured[n].change.s} and not {read[n].change.s}",
                "write declared=mu.Declared(…) with its roles, layouts or folds",
            )
            for n in others
        ],
    )
    return replace(plan, proof="copy")


def _initialised(config: Any) -> nn.Module:
    """A model of a config on the CPU, with weights."""
    model: Any = config.build()
    if hasattr(model, "init_weights"):
        with torch.no_grad():
            model.init_weights()
    return model  # type: ignore[no-any-return]


def _read_off(
    base: Any,
    wide: Any,
    models: tuple[nn.Module, nn.Module],
    declared: Declared,
    example_inputs: ExampleInputs | None = None,
) -> Plan:
    """The plan that attention modules and declarations give, measured if there are example inputs."""
    found, faults = _layouts(*models)
    raise_faults("these two configs cannot be planned", faults)
    tied = (
        {"norm.weight": Fraction(base.dim, wide.dim)} if getattr(wide, "enable_weight_tying", False) else {}
    )
    return infer_plan(
        *models,
        example_inputs=example_inputs,
        declared=replace(declared, layouts={**found, **declared.layouts}, folds={**tied, **declared.folds}),
    )


def _layouts(narrow: nn.Module, broad: nn.Module) -> tuple[dict[str, dict[int, int]], list[Fault]]:
    """Block sizes of everything that holds heads, as torchtitan's attention reads it."""
    others = dict(broad.named_modules())
    layouts: dict[str, dict[int, int]] = {}
    faults: list[Fault] = []
    for path, module in narrow.named_modules():
        other: Any = others.get(path)
        if not hasattr(module, "qkv_linear") or not hasattr(module, "n_kv_heads") or other is None:
            continue
        heads: Any = module
        size, group = heads.head_dim, heads.n_heads // heads.n_kv_heads
        wide_heads = other.head_dim, other.n_heads // other.n_kv_heads
        faults += other_heads(path, (size, group), wide_heads, _ONE_FACTOR)
        blocks = {"wqkv": (group + 2) * size, "wq": group * size, "wk": size, "wv": size}
        for name, tensor in heads.named_parameters():
            part = name.removeprefix("qkv_linear.").partition(".")[0]
            own = {0: 1, 1: group * size} if part == "wo" else {0: blocks.get(part, 1), 1: 1}
            wide_shape = other.get_parameter(name).shape
            grown = [d for d, n in enumerate(tensor.shape) if n != wide_shape[d]]
            if part in (*blocks, "wo") and grown:
                layouts[f"{path}.{name}"] = {d: own[d] for d in grown}
    return layouts, faults

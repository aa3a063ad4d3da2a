"""Growth by experts: from a dense Llama, and of a mixture. Published ways, with an empty optimizer and no balance loss."""

from __future__ import annotations

import torch

import mupscale as mu

from .blocks import State
from .method import Growth, Method

SCORE_NOISE = 1e-3
REDRAWN = 0.5
"""The share of the inner units of every expert that drop-upcycling draws anew."""


def upcycling(growth: Growth) -> mu.Run:
    """Every expert is a copy of the dense layer, behind a random router."""
    run = growth.fresh()
    run.model.load_state_dict(_upcycled(growth, dict(run.model.state_dict())))
    return run


def drop_upcycling(growth: Growth) -> mu.Run:
    """The same, where half of the inner units of every expert are drawn anew with the mean and spread of the trained ones."""
    run = growth.fresh()
    made = _upcycled(growth, dict(run.model.state_dict()))
    generator = torch.Generator().manual_seed(growth.spec.seed)
    for name, value in made.items():
        if ".mlp.experts." not in name:
            continue
        inner = made[name.replace("gate_up_proj", "down_proj")].shape[2]
        for expert in value:
            drawn = torch.randperm(inner, generator=torch.Generator().manual_seed(expert.numel()))
            units = drawn[: round(REDRAWN * inner)]
            rows = expert.view(-1, inner, expert.shape[1]) if "gate_up" in name else expert.T[None]
            noise = torch.randn((len(rows), len(units), rows.shape[2]), generator=generator)
            rows[:, units] = expert.mean() + expert.std() * noise
    run.model.load_state_dict(made)
    return run


def expert_upcycling(growth: Growth) -> mu.Run:
    """Every expert twice, and routers whose rows part by a thousandth of noise."""
    run, base, wide = growth.fresh(), growth.start, growth.spec
    fresh, made = run.model.state_dict(), {}
    generator = torch.Generator().manual_seed(wide.seed)
    for name, value in growth.base.model.state_dict().items():
        copies = value.shape and value.shape[0] == base.experts and fresh[name].shape[0] == wide.experts
        made[name] = value.repeat_interleave(wide.experts // base.experts, 0) if copies else value
        if copies and value.dim() == 2:
            noise = torch.randn(made[name].shape, generator=generator)
            made[name] = made[name] + SCORE_NOISE * value.square().mean().sqrt() * noise
    run.model.load_state_dict(made)
    return run


def _upcycled(growth: Growth, fresh: State) -> State:
    state = dict(growth.base.model.state_dict())
    made = {name: state.get(name, value) for name, value in fresh.items()}
    for name, value in state.items():
        block, inside, part = name.partition(".mlp.")
        if not inside:
            continue
        if part == "gate_proj.weight":
            joined = torch.cat([value, state[f"{block}.mlp.up_proj.weight"]])
            made[f"{block}.mlp.experts.gate_up_proj"] = torch.stack([joined] * growth.spec.experts)
        elif part == "down_proj.weight":
            made[f"{block}.mlp.experts.down_proj"] = torch.stack([value] * growth.spec.experts)
    return made


METHODS = (
    Method("upcycling", "sparse upcycling", "arXiv 2212.05055", "experts", upcycling, rates=(0.25, 0.5)),
    Method(
        "drop_upcycling", "drop-upcycling", "arXiv 2502.19261", "experts", drop_upcycling, rates=(0.25, 0.5)
    ),
    Method(
        "expert_upcycling",
        "Expert Upcycling",
        "arXiv 2604.19835",
        "mixture",
        expert_upcycling,
        rates=(0.25, 0.5),
    ),
)

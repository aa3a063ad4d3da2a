"""Growth by copies of units: with noise, and with other ways of parting them. Which state is kept, the spec says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mupscale as mu

from ..settings.stock import Stock
from .by_family import grow_by_family
from .method import OURS, Growth, Method

FASTER = 1.3
"""The rate of later copies over that of first ones, at which SPARKLING warms them up again."""


def noisy(growth: Growth) -> mu.Run:
    """The paper's: exact copies with noise, by size or by the library's rule."""
    if isinstance(growth.setting, Stock):
        return grow_by_family(growth)
    spec = growth.spec
    if spec.by_rule:
        return _copies(growth, mu.AutoNoise(steps=growth.steps))
    return _copies(growth, mu.SignalNoise(spec.noise))


def split(growth: Growth) -> mu.Run:
    """Every weight that reads copies goes whole to one of them."""
    return _copies(growth, mu.SplitNoise())


def asymmetric(growth: Growth) -> mu.Run:
    """Copies of which the first keeps its moments, and the others step 1.3 times as far."""
    run = _copies(growth, mu.SignalNoise(0.0))
    _faster_(run, _plan(growth), FASTER)
    return run


def uneven(growth: Growth) -> mu.Run:
    """Copies that are read with unequal shares, drawn at random, and an empty optimizer."""
    run = _copies(growth, mu.SignalNoise(0.0))
    generator = torch.Generator().manual_seed(growth.spec.seed)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            for dim, axis in enumerate(_plan(growth)[name].axes):
                if axis.role != "in" or axis.wide == axis.base or parameter.dim() < 2:
                    continue
                sources = torch.tensor([axis.source(i) for i in range(axis.wide)])
                shares = 0.1 + torch.rand(axis.wide, generator=generator)
                whole = torch.zeros(axis.base).index_add(0, sources, shares)[sources]
                shares = shares / whole * torch.bincount(sources)[sources]
                parameter.mul_(shares.view([-1 if d == dim else 1 for d in range(parameter.dim())]))
    run.optimizer.state.clear()
    return run


def _copies(growth: Growth, noise: mu.Noise | mu.AutoNoise) -> mu.Run:
    """The wide run with the state that the spec asks for."""
    spec, plan = growth.spec, _plan(growth)
    run = mu.upscale(
        growth.base,
        lambda: growth.setting.build(spec.width),
        noise,
        loss=growth.loss if spec.by_rule else None,
        plan=plan,
        seed=spec.seed,
    )
    if spec.state == "wrong_units":
        _lose_units_(run, plan)
    elif spec.state == "asymmetric":
        _keep_first_copies_(run, plan)
    elif spec.state != "carried":
        run.optimizer.state.clear()
    return run


def _plan(growth: Growth) -> mu.Plan:
    return growth.setting.plan(growth.start.width, growth.spec.width)


def _lose_units_(run: mu.Run, plan: mu.Plan) -> None:
    """Copy moments as they are: the first moment is in units of gradients and the second of their squares."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            r, state = float(plan[name].change.r), run.optimizer.state[parameter]
            state["exp_avg"].div_(r)
            state["exp_avg_sq"].div_(r * r)


def _later_copies(plan: mu.Plan, name: str, parameter: Tensor) -> Tensor:
    """Where a tensor's entries are not the first copy of their source."""
    later = torch.zeros(parameter.shape, dtype=torch.bool)
    for dim, axis in enumerate(plan[name].axes):
        sources = [axis.source(i) for i in range(axis.wide)]
        found = torch.tensor([sources.index(source) < i for i, source in enumerate(sources)])
        later.index_fill_(dim, found.nonzero().flatten(), value=True)
    return later


def _keep_first_copies_(run: mu.Run, plan: mu.Plan) -> None:
    """Empty the moments of every entry that is not the first copy of its source."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            state, later = run.optimizer.state[parameter], _later_copies(plan, name, parameter)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment].masked_fill_(later, 0.0)


def _faster_(run: mu.Run, plan: mu.Plan, factor: float) -> None:
    """Let every step of the optimizer go so many times as far for later copies."""
    parts = [(p, _later_copies(plan, name, p)) for name, p in run.model.named_parameters()]
    kept: list[Tensor] = []

    def before(*_: Any) -> None:
        kept[:] = [parameter.detach().clone() for parameter, _ in parts]

    def after(*_: Any) -> None:
        with torch.no_grad():
            for (parameter, later), old in zip(parts, kept, strict=True):
                parameter.add_((parameter - old) * later, alpha=factor - 1)

    run.optimizer.register_step_pre_hook(before)
    run.optimizer.register_step_post_hook(after)


METHODS = (
    Method("ours", "copies with noise", "the paper's copies", "width", noisy, noise=0.1),
    Method("split", "copies, each weight whole to one of them", f"{OURS}, a variant", "width", split),
    Method(
        "sparkling",
        "SPARKLING: state of first copies, later ones at 1.3 × the rate",
        "arXiv 2602.02472",
        "width",
        asymmetric,
        state="asymmetric",
    ),
    Method("lemon", "LEMON: copies read with unequal shares", "arXiv 2310.07999", "width", uneven),
)

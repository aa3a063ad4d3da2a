"""Every way to get a wide model that the experiments compare: ours, its variants, and what others do.

Each is a function from a trained base to a run that is ready to train. Which axes grow and which of them are read, the
library's plan says; the peers' own rules stand here. A method that cannot be applied to a model says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.noise.resolved import reference_size

from .setting import Setting

TENTH = 0.1
"""What Net2WiderNet multiplies the learning rate by."""
JITTER = 0.05
"""Noise on a randomly duplicated weight, in units of its spread. Net2Net asks for a little and gives no size."""
SHRINK = 0.4
"""What the weights of the base are multiplied by before a wide model takes them (arXiv 2411.07340)."""
DECIBELS = 10.0
"""Signal to noise where weights are tiled. HyperCloning measures noise like this; the number is ours."""


@dataclass(frozen=True)
class Start:
    """What a method begins with: a trained base, k, and the recipe that tuning found."""

    setting: Setting
    base: mu.Run
    width: int
    k: int
    base_lr: float
    recipe: mu.tuning.Recipe
    seed: int

    @property
    def wide(self) -> int:
        return self.k * self.width

    @property
    def plan(self) -> mu.Plan:
        return self.setting.plan(self.width, self.wide)

    def build(self) -> nn.Module:
        return self.setting.build(self.wide)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Method:
    """One row of the comparison. `tuned`: with which noise sweep 2 was run for it, or None when it needs none.

    A `control` pays for neither base nor tuning: it shows what a part of a method does alone.
    """

    name: str
    label: str
    grow: Callable[[Start], mu.Run]
    tuned: str | None = None
    refuses: Callable[[nn.Module], str | None] = lambda model: None
    control: bool = False


def from_scratch(start: Start) -> mu.Run:
    """A fresh wide run under μP, with the learning rate of sweep 1."""
    return start.setting.fresh(start.wide, start.base_lr, start.seed)


def scratch_at_our_rate(start: Start) -> mu.Run:
    """A fresh wide run with the learning rate of sweep 2: what that rate does without the base."""
    return start.setting.fresh(start.wide, start.recipe.lr, start.seed)


def ours(start: Start) -> mu.Run:
    """The exact map with its optimizer state, noise and learning rate by the recipe."""
    return mu.upscale(start.base, start.build, recipe=start.recipe, plan=start.plan, seed=start.seed)


def ours_muon(start: Start) -> mu.Run:
    """Ours, with the hidden matrices handed to Muon at AdamW's learning rate, as its variant for that promises."""
    run = ours(start)
    old = run.optimizers[0]
    hidden = set(_hidden(start.plan))
    constants = {k: v for k, v in start.setting.constants.items() if k == "weight_decay"}
    muon = mu.param_groups(
        run.model,
        run,
        torch.optim.Muon,
        parameters=lambda name, _: name in hidden,
        lr=start.recipe.lr,
        adjust_lr_fn="match_rms_adamw",
        **constants,
    )
    rest = mu.param_groups(
        run.model,
        run,
        start.setting.optimizer,
        parameters=lambda name, _: name not in hidden,
        lr=start.recipe.lr,
        **start.setting.constants,
    )
    make: Any = start.setting.optimizer
    adamw = make(rest)
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = old.state[parameter]
    return mu.Run(run.model, [torch.optim.Muon(muon), adamw], since=run.since, steps=run.steps)


def paper_code(start: Start) -> mu.Run:
    """What the code published with the paper does: its noise is not the paper's, and eps stays as it is.

    With one σ̄ for all, noise on hidden matrices is divided by k along with the weights. With noise relative to the
    signal, gains are shifted by t times their size, and running statistics are lost.
    """
    recipe, plan = start.recipe, start.plan
    shrunk = set(_hidden(plan)) if not isinstance(recipe.sigma, Mapping) else set()
    sigmas: dict[str, Any] = {}
    for name, entry in plan.tensors.items():
        if entry.kind == "parameter" and len(entry.axes) > 1:
            sigma: Any = recipe.sigma[name] if isinstance(recipe.sigma, Mapping) else recipe.sigma
            sigmas[name] = float(sigma / start.k) if name in shrunk else sigma
    run = mu.upscale(start.base, start.build, mu.MupNoise(sigmas), lr=recipe.lr, plan=plan, seed=start.seed)
    for group in run.optimizers[0].param_groups:
        if "eps" in group:
            group["eps"] = recipe.constants["eps"]
    if isinstance(recipe.sigma, Mapping):
        _lose_statistics_(run.model, best_noise(recipe))
    return run


def tiling(start: Start) -> mu.Run:
    """HyperCloning: the exact map with noise in pairs that cancel, a fresh optimizer, and the base's rates."""
    sigmas: dict[str, Any] = {}
    weights = dict(start.base.model.named_parameters())
    for name, entry in start.plan.tensors.items():
        if entry.kind == "parameter" and len(entry.axes) > 1:
            size = float(weights[entry.sources[0]].detach().square().mean().sqrt()) * float(entry.change.s)
            unit = float(reference_size(start.plan[name], start.base.since))
            sigmas[name] = size * 10 ** (-DECIBELS / 20) / unit
    bare = mu.Run(start.base.model, since=start.base.since)
    run = mu.upscale(bare, start.build, mu.PairedNoise(sigmas), plan=start.plan, seed=start.seed)
    return plain(start, run.model)


def net2wider(start: Start, jitter: float = JITTER) -> mu.Run:
    """Net2WiderNet: units are duplicated at random, whoever reads them divides by how often; a tenth of the rate."""
    model, generator = start.build(), start.generator()
    sources = dict(_tensors(start.base.model))
    maps: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        for name, old in _tensors(model):
            entry = start.plan[name]
            value = sources[entry.sources[0]].detach()
            for dim, axis in enumerate(entry.axes):
                if not axis.grows:
                    continue
                if (axis.base, axis.wide) not in maps:
                    more = torch.randint(axis.base, (axis.wide - axis.base,), generator=generator)
                    maps[axis.base, axis.wide] = torch.cat([torch.arange(axis.base), more])
                chosen = maps[axis.base, axis.wide].to(value.device)
                value = value.index_select(dim, chosen)
                if axis.role == "in" and entry.kind == "parameter":
                    copies = torch.bincount(chosen, minlength=axis.base)[chosen].to(value.dtype)
                    value = value / copies.view([-1 if d == dim else 1 for d in range(value.dim())])
            if entry.kind == "parameter" and value.dim() > 1 and jitter:
                noise = torch.randn(value.shape, generator=generator).to(value)
                value = value + jitter * value.std() * noise
            old.data = value.clone()
    return plain(start, model, TENTH)


def zero_padding(start: Start) -> mu.Run:
    """The base in the first block; new units are initialised afresh, and what reads them starts at zero."""
    fresh = from_scratch(start)
    sources = dict(_tensors(start.base.model))
    with torch.no_grad():
        for name, tensor in _tensors(fresh.model):
            entry = start.plan[name]
            source = sources[entry.sources[0]].detach()
            tensor.data = tensor.data.to(source)
            written = [slice(axis.base) if axis.role != "in" else slice(None) for axis in entry.axes]
            for dim, axis in enumerate(entry.axes):
                if axis.role == "in" and axis.grows:
                    read = list(written)
                    read[dim] = slice(axis.base, None)
                    tensor[tuple(read)] = 0
            tensor[tuple(slice(axis.base) for axis in entry.axes)] = source
    return plain(start, fresh.model)


def shrink_pad(start: Start) -> mu.Run:
    """The base, shrunk, in the first block of a wide model that is initialised afresh, and a fresh optimizer.

    This is how arXiv 2411.07340 starts a wide model under μP from a narrow one.
    """
    fresh = from_scratch(start)
    sources = dict(_tensors(start.base.model))
    with torch.no_grad():
        for name, tensor in fresh.model.named_parameters():
            entry = start.plan[name]
            first = tensor[tuple(slice(axis.base) for axis in entry.axes)]
            first.add_(SHRINK * sources[entry.sources[0]].detach())
    return fresh


def plain(start: Start, model: nn.Module, factor: float = 1.0) -> mu.Run:
    """A run with a fresh optimizer in which every tensor has the rate that it had in the base, times a factor."""
    names = {id(p): name for name, p in start.base.model.named_parameters()}
    wide = dict(model.named_parameters())
    groups = []
    for group in start.base.optimizers[0].param_groups:
        own = {
            key: value for key, value in group.items() if key not in ("params", "lr_factor", "param_names")
        }
        params = [wide[names[id(p)]] for p in group["params"]]
        groups.append({**own, "lr": group["lr"] * factor, "params": params})
    make: Any = start.setting.optimizer
    model.train(start.base.model.training)
    return mu.Run(model, make(groups), steps=start.base.steps)


def best_noise(recipe: mu.tuning.Recipe) -> float:
    """The noise of the best point of sweep 2, as it was tried."""
    done = [row for row in recipe.tried if row["sweep"] == "wide" and row["steps"] == recipe.wide_steps]
    return float(min((row["loss"], row["noise"]) for row in done if row["loss"] is not None)[1])


def _hidden(plan: mu.Plan) -> Iterator[str]:
    """Matrices that grow both in what they read and in what they write."""
    for name, entry in plan.tensors.items():
        roles = {axis.role for axis in entry.axes if axis.grows}
        if entry.kind == "parameter" and roles == {"in", "out"}:
            yield name


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _lose_statistics_(model: nn.Module, t: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            with torch.no_grad():
                module.weight.add_(t * module.weight.square().mean().sqrt())


def _over_units(model: nn.Module) -> str | None:
    """Why units cannot be added one by one: a norm over units sees all of them."""
    found = [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm)]
    if not found:
        return None
    return f"{found[0]} normalises over units: with some of them duplicated or added, its output changes"


def _not_matrices(model: nn.Module) -> str | None:
    found = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    return f"{found[0]} is a convolution, and torch's Muon steps matrices only" if found else None


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("scratch", "from scratch", from_scratch),
        Method("our_rate", "from scratch, our rate", scratch_at_our_rate, "main", control=True),
        Method("continue", "the base continues", lambda start: start.base),
        Method("ours", "ours", ours, "main"),
        Method("net2wider", "Net2WiderNet", net2wider, refuses=_over_units),
        Method("tiling", "tiling (HyperCloning)", tiling),
        Method("zero_padding", "zero padding", zero_padding, refuses=_over_units),
        Method("paper_code", "the paper's code", paper_code, "main"),
        Method("ours_paired", "ours, paired noise", ours, "paired"),
        Method("ours_muon", "ours, Muon", ours_muon, "main", refuses=_not_matrices),
    )
}


@cache
def why_not(method: str, setting: Setting) -> str | None:
    """Why a method cannot be applied in a setting; None where it can."""
    return METHODS[method].refuses(mu.plans.on_meta(lambda: setting.build(setting.reference)))

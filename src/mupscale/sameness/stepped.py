"""Both checkpoints in one model, one after the other: the loss of a batch, gradients, and one step of the optimizer.

Needs memory for whole models: weights, gradients and moments of one, and what is kept of the other. Knows models of stock types, and
models that the caller builds. The step is torch's own Adam or AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MupscaleError
from ..families.batches import loss_of_batch, read_batch
from ..families.loaded import check_memory
from ..families.models import config_from, construct, model_class, quiet
from ..formats.snapshot import Filed, Snapshot
from .names import Matched
from .tensors import Pages

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_COPIES = 8  # of the weights: two models, gradients, steps and moments


@dataclass(frozen=True)
class Ways:
    """How a model is built, and the loss that it is run with."""

    loss: Callable[[nn.Module], Tensor]
    model: Callable[[], nn.Module] | None = None
    """None for the stock model of a `config.json`."""

    @staticmethod
    def of(
        batch: Mapping[str, Tensor] | Path | str | None,
        model: Callable[[], nn.Module] | None,
        loss: Callable[[nn.Module], Tensor] | None,
    ) -> Ways | None:
        """What a caller asks for; None for a comparison of files alone."""
        if batch is None and model is None and loss is None:
            return None
        if (batch is None) == (loss is None):
            raise MupscaleError(
                "a model is run with either a batch or a loss; pass one of batch= and loss=",
                code="argument.batch_or_loss",
            )
        if loss is None:
            inputs = batch if isinstance(batch, Mapping) else read_batch(Path(str(batch)))
            loss = loss_of_batch(inputs)
        return Ways(loss, model)


@dataclass
class _Ran:
    """What one checkpoint gave."""

    loss: float
    gradients: dict[str, Tensor]
    steps: dict[str, Tensor]
    """What one step adds to each weight; empty without moments."""


def side_by_side(
    both: Matched, ways: Ways, config: Mapping[str, Any] | None
) -> tuple[dict[str, float], list[str]]:
    """Losses of both, and how far gradients and steps are apart, relative to their size; and notes on what was left out."""
    try:
        model = _built(ways, config)
        ran = [_run(model, one, ways) for one in (both.a, both.b)]
    except (MupscaleError, ImportError) as error:
        claim = error.claim if isinstance(error, MupscaleError) else str(error)
        return {}, [f"the model was not run: {claim}"]
    one, other = ran
    found = {"loss of A": one.loss, "loss of B": other.loss}
    found["gradients apart by"] = _apart(one.gradients, other.gradients)
    if one.steps and other.steps:
        return {**found, "one step apart by": _apart(one.steps, other.steps)}, []
    return found, ["no step was taken: it needs moments of Adam, step counts and settings in both"]


def _built(ways: Ways, config: Mapping[str, Any] | None) -> nn.Module:
    if ways.model is not None:
        return ways.model().eval()
    if config is None:
        raise MupscaleError(
            "neither checkpoint has a config.json; pass config=, or model= with a function that builds it",
            code="same.no_config",
        )
    stock = config_from(config)
    with quiet():
        return construct(stock, model_class(stock)).float().eval()


def _run(model: nn.Module, one: Snapshot, ways: Ways) -> _Ran:
    named = dict(model.named_parameters())
    check_memory(_COPIES * sum(p.numel() * p.element_size() for p in named.values()), "running both models")
    held = {**one.weights, **one.masters}
    missing = [name for name in named if name not in held or held[name].shape != tuple(named[name].shape)]
    if missing:
        raise MupscaleError(
            f"{missing[0]} of the model is not among the tensors that both have, or has another shape",
            code="same.model_has_other_tensors",
        )
    with Pages() as pages:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.grad = None
                parameter.copy_(_read(held[name], pages))
        loss = ways.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {n: p.grad.detach().clone() for n, p in named.items() if p.grad is not None}
        return _Ran(float(loss.detach()), gradients, _steps(named, one, pages))


def _read(stored: Filed, pages: Pages) -> Tensor:
    return pages.read(stored, (0,) * len(stored.shape), stored.shape)


def _steps(named: Mapping[str, nn.Parameter], one: Snapshot, pages: Pages) -> dict[str, Tensor]:
    """What a step of Adam adds to each weight; empty where something of it is missing."""
    trained = {name: p for name, p in named.items() if p.grad is not None}
    ready = (
        name in one.steps
        and all(key in one.settings.get(name, {}) for key in _SETTINGS)
        and all(slot in one.moments.get(name, {}) for slot in _MOMENTS)
        for name in trained
    )
    if not all(ready):
        return {}
    before = {name: p.detach().clone() for name, p in trained.items()}
    for name, parameter in trained.items():
        settings = one.settings[name]
        decoupled = settings.get("decoupled_weight_decay", True)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind([parameter], **{key: settings[key] for key in _SETTINGS})
        state = {slot: _read(one.moments[name][slot], pages).clone() for slot in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(one.steps[name])), **state}
        optimizer.step()
    return {name: p.detach() - before[name] for name, p in trained.items()}


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far two sets of tensors are apart, by the norm of all of them."""
    gap = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    size = sum(float(tensor.double().square().sum()) for tensor in one.values())
    return (gap / size) ** 0.5 if size else 0.0

"""What trackers are given: the moment of growth, and the trials of a study, in TensorBoard, W&B or MLflow.

A tracker is what the user has at hand: a `SummaryWriter`, a run of W&B, or the module `mlflow` with an active run. Each is
known by its methods, so none of the three packages is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..arguments import wrong_kind
from ..errors import Fault, raise_faults
from ..extras import needs
from ..optimizers.rates import Rates
from ..proofs.identity import Loss, keeping_buffers
from ..runs.run import Run
from ..tensors.random_states import forked
from ..training.check.symmetry import awake, noise_shares, symmetry
from ..training.units.clip import grad_norm

Write = Callable[[Mapping[str, float], int | None], None]
"""Takes named numbers, and the step at which they stand."""


def log_growth(
    tracker: Any, base: Run, wide: Run, *, loss: Loss | None = None, steps: int | None = None
) -> dict[str, float]:
    """Tell a tracker what growth did, and return the numbers that were logged.

    Under `growth/`: parameters and learning rate at the reference (the largest of all groups) before and after, how large
    the noise is next to the weights and how far copies have parted (the largest, and each tensor), and how awake new parts
    are. With `loss`, also the loss and the gradient norm in the units of the reference, before and after; without noise
    they do not change. Without it, the losses that `upscale` recorded are taken. `steps` is how many steps the base has
    taken, the tracker's x-axis. Neither run is changed.

    `tracker` is a `SummaryWriter` of TensorBoard, a run of W&B, or the module `mlflow`.

    >>> from torch import nn
    >>> import mupscale as mu
    >>> class Tracker:                                                        # what W&B's runs look like
    ...     def log(self, data, step=None): self.data = data
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> base, tracker = mu.Run(make(4)), Tracker()
    >>> told = log_growth(tracker, base, mu.upscale(base, lambda: make(8), mu.MupNoise(0.1)), steps=100)
    >>> tracker.data == told, told["growth/parameters_before"], told["growth/parameters_after"]
    (True, 21.0, 41.0)
    """
    faults = [
        fault
        for name, side in (("base", base), ("wide", wide))
        for fault in wrong_kind(name, side, Run, f"write mu.Run({name}), or what mu.upscale gave")
    ]
    raise_faults("log_growth compares two runs", faults)
    write = _writer(tracker)
    told: dict[str, float] = {}
    for name, run in (("before", base), ("after", wide)):
        told[f"parameters_{name}"] = float(sum(p.numel() for p in run.model.parameters()))
        rates = [rate for optimizer in run.optimizers for rate in Rates(optimizer).at_reference()]
        told |= {f"lr_{name}": max(rates)} if rates else {}
        if loss is not None:
            told[f"loss_{name}"], told[f"grad_norm_{name}"] = _loss_and_norm(run, loss)
        elif "loss" in wide.provenance:
            told[f"loss_{name}"] = float(wide.provenance["loss"][name])
    shares = {}
    if {"noise", "added_noise"} & wide.provenance.keys():
        shares = {name: found.share for name, found in noise_shares(base, wide).items()}
    for what, values in (("noise", shares), ("symmetry", symmetry(wide)), ("awake", awake(wide))):
        told |= {what: max(values.values())} if values else {}
        told |= {f"{what}/{name}": value for name, value in values.items()}
    told = {f"growth/{name}": value for name, value in told.items()}
    write(told, steps)
    return told


def log_study(
    tracker: Any, folder: str | Path, *, storage: Any = None, study: str = "mupscale"
) -> list[dict[str, float]]:
    """Tell a tracker the trials of a study, one point after the other, and return what was logged.

    Under `study/base/` and `study/wide/`: noise, learning rate, steps and loss of every point of the two sweeps that has a
    loss, or that it diverged. Then `study/best/`: loss, noise and learning rate of the recipe, and the loss without noise.
    The x-axis is the number of the point. `folder`, `storage` and `study` are those of `tune`; the study may be running.

    >>> from mupscale import MupscaleError
    >>> try:
    ...     log_study(lambda: None, "nowhere")
    ... except MupscaleError as error:
    ...     print(error.code)
    report.not_a_tracker
    """
    write = _writer(tracker)
    with needs("a study", "tune"):
        from .known import know, tried_rows
    known = know(folder, storage, study)
    told = []
    for number, row in enumerate(tried_rows(known)):
        kept = {name: float(value) for name, value in row.items() if name != "sweep" and value is not None}
        told.append({f"study/{row['sweep']}/{name}": value for name, value in kept.items()})
        told[-1]["study/point"] = float(number)
    recipe = known.recipe
    if recipe is not None and known.wide is not None and known.wide.best is not None:
        best = {"loss": recipe.loss, "lr": known.wide.best.lr, "noise": known.wide.best.noise}
        best |= {"loss_without_noise": recipe.control}
        told.append({f"study/best/{name}": float(value) for name, value in best.items() if value is not None})
        told[-1]["study/point"] = float(len(told) - 1)
    for values in told:
        write(values, None)
    return told


def _writer(tracker: Any) -> Write:
    """How this tracker is given numbers; raises if it is none of those that are known."""
    if callable(getattr(tracker, "add_scalar", None)):  # TensorBoard

        def scalars(values: Mapping[str, float], step: int | None) -> None:
            at = _number(values) if step is None else step
            for name, value in values.items():
                tracker.add_scalar(name, value, at)
            tracker.flush()

        return scalars
    if callable(getattr(tracker, "log_metrics", None)):  # MLflow
        return lambda values, step: tracker.log_metrics(
            dict(values), step=_number(values) if step is None else step
        )
    if callable(
        getattr(tracker, "log", None)
    ):  # W&B; its steps may not go back, so points of a study get none
        return lambda values, step: tracker.log(dict(values), step=step)
    what = f"a {type(tracker).__name__}, found none of add_scalar, log_metrics, log"
    remedy = "pass a SummaryWriter, a run of wandb, or the module mlflow"
    raise_faults("this is no tracker", [Fault("report.not_a_tracker", "tracker", what, remedy)])
    raise AssertionError


def _number(values: Mapping[str, float]) -> int:
    return int(values.get("study/point", 0))


def _loss_and_norm(run: Run, loss: Loss) -> tuple[float, float]:
    """The loss on its batch and the gradient norm at the reference; gradients and buffers are as before afterwards."""
    parameters = list(run.model.parameters())
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        # The same dropout, where there is some, before and after.
        with forked(run.model, seed=0), keeping_buffers(run.model):
            value = loss(run.model)
            torch.autograd.backward(value)
        return float(value.detach()), float(grad_norm(run.model, run))
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad

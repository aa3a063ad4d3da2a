"""The proxy that a user provides: how the model is built at any width, how it is trained, with which optimizer.

Reads a proxy from a Python file or a module and checks it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import shown
from ..budgets.user_file import load_file, missing_functions
from ..errors import Fault, MupscaleError, raise_faults
from ..families.config.goal import Way
from ..plans.plan import Plan
from ..rules.optimizers import qualified_name
from ..runs.run import Run
from .digest import digest_of

ReportLoss = Callable[[int, "float | Tensor"], None]
Train = Callable[[Run, int, ReportLoss], object]


@dataclass(frozen=True)
class Proxy:
    """The small model that a study trains, and how.

    Args:
        build: `build(width)` returns the model.
        train: `train(run, steps, report)` loops over `range(run.steps, steps)` and ends each turn with `report(step, loss)`.
        optimizer: The class of the optimizer.
        settings: Reference constants other than the learning rate: weight_decay, eps, betas, …
        schedule: `schedule(optimizer, steps)` returns a scheduler for that many steps; the loop steps it:
            `for s in run.schedulers: s.step()`.
        loss: `loss(model)`, for the search of layouts that shapes do not determine.
        device: Where models are trained; by default where `build` makes them.
        batch: The batch size, recorded in the recipe.
        plan: `plan(base, wide, by)` returns the plan between two widths, where it is known; by default it is inferred from `build`
            and `loss`.
        flops: `flops(width)` returns the FLOPs of one step; a file that has inputs() gets them counted.
        digest: Identifies the proxy, so that a study cannot be continued with another one; by default a hash of its functions'
            code.

    Raises:
        MupscaleError: If a function is missing or takes other arguments.

    >>> proxy = Proxy(build=lambda width: nn.Linear(3, width), train=lambda run, steps, report: None)
    >>> proxy.optimizer_name
    'torch.optim.AdamW'
    """

    build: Callable[[int], nn.Module]
    train: Train
    optimizer: type[Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: Callable[[Optimizer, int], Any] | None = None
    loss: Callable[[nn.Module], Tensor] | None = None
    device: str | None = None
    batch: int | None = None
    plan: Callable[[int, int, Way], Plan] | None = None
    flops: Callable[[int], int] | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        faults = missing_functions(self, build=("width",), train=("run", "steps", "report"))
        optional = {
            "schedule": ("optimizer", "steps"),
            "loss": ("model",),
            "plan": ("base", "wide", "by"),
            "flops": ("width",),
        }
        given_ones = {name: of for name, of in optional.items() if getattr(self, name) is not None}
        faults += missing_functions(self, **given_ones)
        given: Any = self.optimizer
        if not (isinstance(given, type) and issubclass(given, Optimizer)):
            what = f"it is {shown(given)}, expected an optimizer class"
            faults.append(
                Fault(
                    "proxy.not_an_optimizer_class", "optimizer", what, "write optimizer = torch.optim.AdamW"
                )
            )
        if not isinstance(self.settings, dict) or "lr" in self.settings:
            what = (
                "not a dict, or one with an lr, expected the reference constants other than the learning rate"
            )
            faults.append(
                Fault(
                    "proxy.settings_not_constants",
                    "settings",
                    what,
                    'write settings = {"weight_decay": 0.1}, for example',
                )
            )
        raise_faults("the proxy does not define what a study needs", faults)

    @property
    def optimizer_name(self) -> str:
        """The full name of the optimizer's class."""
        return qualified_name(self.optimizer)


_FIELDS = ("build", "train", "optimizer", "settings", "schedule", "loss", "device", "batch")


def read_proxy(source: Proxy | ModuleType | str | Path) -> Proxy:
    """A proxy from a file, or from a module that was imported."""
    if isinstance(source, Proxy):
        parts = (source.build, source.train, source.schedule, source.loss)
        return source if source.digest else replace(source, digest=digest_of(*parts))
    if isinstance(source, ModuleType):
        return read_proxy(_from(source, ""))
    path = Path(source)
    return _from(load_file(path), hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def _counted(make: Callable[[int], nn.Module], inputs: Callable[[], Any], width: int) -> int:
    """FLOPs of one step, counted on what `inputs()` returns."""
    from ..budgets.flops import step_of

    try:
        return step_of(partial(make, width), inputs(), width).counted
    except MupscaleError:
        raise
    except Exception as error:  # user code: any exception is reported
        raise MupscaleError(
            f"inputs() or build({width}) failed: {type(error).__name__}: {error}",
            code="proxy.function_failed",
        ) from error


def _from(module: ModuleType, digest: str) -> Proxy:
    values = {name: getattr(module, name) for name in _FIELDS if hasattr(module, name)}
    if callable(getattr(module, "inputs", None)) and callable(values.get("build")):
        values["flops"] = partial(_counted, values["build"], module.inputs)
    return Proxy(**{"build": None, "train": None, **values, "digest": digest})

"""Train and eval mode: a proof measures the mode that a model is in, and then the other one.

In train mode a model may add noise, a penalty or the statistics of a batch, and growing right after an evaluation would not see
them. What deviates in the second mode refuses nothing, because a model may be meant for one mode alone: it is a need of the
plan and stands in the record of the proof. A loss or a step may set the mode itself, and put it back: what counts is the mode
in which the model ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ..models.need import Need
from .identity import Loss, evaluated

ModeName = Literal["train", "eval"]
_NAMES: dict[bool, ModeName] = {True: "train", False: "eval"}


@dataclass(frozen=True)
class ModeProof:
    """What is known of one mode; printed, it is a sentence.

    >>> print(ModeProof("exact"), ModeProof("unmeasured", "the steps run in one mode"), sep="; ")
    exact; nothing was measured: the steps run in one mode
    """

    kind: Literal["exact", "deviates", "unmeasured"]
    what: str = ""
    """What deviates, why nothing was measured, or, where it is exact, which modules were in the other mode."""

    def __str__(self) -> str:
        if self.kind == "exact":
            return f"exact, {self.what}" if self.what else "exact"
        return f"nothing was measured: {self.what}" if self.kind == "unmeasured" else self.what


Modes = Mapping[ModeName, ModeProof]
"""By mode what is known of it, the measured mode first; empty where this was not asked for."""
_SET = ModeProof("unmeasured", "the loss sets the mode of the model")


@contextmanager
def in_mode(training: bool, *models: nn.Module) -> Iterator[None]:
    """`model.train(training)` inside the block; afterwards every module has the mode it had.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
    >>> with in_mode(False, model):
    ...     model.training
    False
    >>> model.training, model[1].training
    (True, False)
    """
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.train(training)
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def watched_modes(model: nn.Module) -> Iterator[set[bool]]:
    """The modes that a model is in when it, or a module of it, is called inside the block with gradients.

    >>> model = nn.Linear(1, 1)
    >>> with watched_modes(model) as ran:
    ...     _ = model.eval()(torch.ones(1)), model.train()
    >>> ran
    {False}
    """
    ran: set[bool] = set()

    def note(*_: object) -> None:
        # A model that is compiled here would keep the call of this hook.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            ran.add(model.training)

    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def measured_modes(measure: Callable[[], str], loss: Loss, base: nn.Module, *others: nn.Module) -> Modes:
    """By mode what holds, after the loss was found exact: the mode in which it runs the base first, then the other one.

    `measure()` returns what deviates, or "" for nothing. It is called with the models in the other mode.

    >>> model, loss = nn.Linear(1, 1).eval(), lambda model: model(torch.ones(1)).sum()
    >>> modes = measured_modes(lambda: "the loss differs by 1.0e-01", loss, model)
    >>> modes["eval"].kind, modes["train"].kind
    ('exact', 'deviates')
    >>> mode_needs(modes)
    frozenset({'eval mode alone (train mode: the loss differs by 1.0e-01)'})
    """
    own = base.training
    with watched_modes(base) as ran:
        evaluated(base, loss, wanted=lambda _: False)
    if ran and own not in ran:
        return _by_mode(base, not own, _SET)
    try:
        with in_mode(not own, base, *others), watched_modes(base) as ran:
            found = measure()
        other = ModeProof("deviates" if found else "exact", found) if not ran or (not own) in ran else _SET
    except Exception as error:  # the user's code, in a mode that may not be meant for this loss
        other = ModeProof("unmeasured", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return _by_mode(base, own, other)


def mode_of_steps(base: nn.Module, ran: set[bool]) -> Modes:
    """By mode what holds after steps were found exact, in which the base ran in these modes."""
    own = base.training if base.training in ran or not ran else not base.training
    return _by_mode(base, own, ModeProof("unmeasured", "the steps run in one mode"))


def _by_mode(base: nn.Module, exact: bool, other: ModeProof) -> Modes:
    modules = list(base.modules())
    mixed = sum(module.training is not exact for module in modules) if base.training is exact else 0
    what = f"with {mixed} of {len(modules)} modules in {_NAMES[not exact]} mode" if mixed else ""
    return {_NAMES[exact]: ModeProof("exact", what), _NAMES[not exact]: other}


def mode_needs(modes: Modes) -> frozenset[Need]:
    """The need of a plan that is exact in one mode and was not found to be so in the other."""
    missed = {name: mode for name, mode in modes.items() if mode.kind != "exact"}
    return frozenset(
        Need(f"eval mode alone ({name} mode: {mode})", "eval mode")
        if name == "train"
        else Need(f"train mode alone ({name} mode: {mode})", "train mode")
        for name, mode in missed.items()
    )

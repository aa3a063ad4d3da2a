"""Train and eval mode: a proof measures the mode that a model is in, and then the other one.

In train mode a model may add noise, a penalty or the statistics of a batch, and growing right after an evaluation would not see
them. What deviates in the second mode refuses nothing, because a model may be meant for one mode alone: it is a need of the
plan and stands in the record of the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from ..models.need import EVAL_ALONE, TRAIN_ALONE, Need

UNMEASURED = "nothing was measured"
"""How the word on a mode begins that could not be measured; the reason follows."""
_NAMES = {True: "train", False: "eval"}


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


def measured_modes(measure: Callable[[], str], base: nn.Module, *others: nn.Module) -> dict[str, str]:
    """By mode what was measured: "exact" in the mode that the base is in, and what `measure` says of the other one.

    `measure()` returns what deviates, or "" for nothing. It is called with the models in the other mode.

    >>> modes = measured_modes(lambda: "the loss differs by 1.0e-01", nn.Linear(1, 1).eval())
    >>> modes
    {'eval': 'exact', 'train': 'the loss differs by 1.0e-01'}
    >>> mode_needs(modes)
    frozenset({'eval mode alone (train mode: the loss differs by 1.0e-01)'})
    """
    own, modules = base.training, list(base.modules())
    mixed = sum(module.training is not own for module in modules)
    left = f", with {mixed} of {len(modules)} modules in {_NAMES[not own]} mode" if mixed else ""
    try:
        with in_mode(not own, base, *others):
            found = measure()
            if base.training is own:
                found = f"{UNMEASURED}: the loss sets the mode of the model"
    except Exception as error:  # the user's code, in a mode that may not be meant for this loss
        found = f"{UNMEASURED}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return {_NAMES[own]: f"exact{left}", _NAMES[not own]: found or "exact"}


def mode_needs(modes: Mapping[str, str]) -> frozenset[Need]:
    """The need of a plan that is exact in the first of two modes and was not found to be so in the second."""
    own, *others = modes or [""]
    alone = TRAIN_ALONE if own == _NAMES[True] else EVAL_ALONE
    return frozenset(Need(f"{alone} ({n} mode: {modes[n]})") for n in others if modes[n] != "exact")

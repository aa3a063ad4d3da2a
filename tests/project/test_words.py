"""Public parameters use the words of one list, each with one meaning."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mupscale as mu
from mupscale.trainers import huggingface, lightning

WORDS = [
    "a", "b", "profile", "make", "start", "config", "multipliers", "proxy", "settings",
    "engine", "base", "wide", "model", "run", "schedule", "optimizers", "schedulers", "scheduler",
    "optimizer", "state", "out", "parameters", "params", "spent", "budget", "to", "like", "decayed",
    "batch", "context", "no_decay", "step", "tensors", "batches", "loss", "example_inputs", "probe", "plan",
    "experts", "groups", "by", "centred", "order", "noise", "lr", "peak_lr", "empty_state",
    "step_cost", "rewarm", "recipe", "std", "seed", "since", "optimizer_class",
    "rule", "ema", "max_norm", "max_value", "p", "widths", "before", "steps", "seeds", "dtype",
    "with_state", "batch_file", "threads", "dry_run", "on", "tolerance", "earlier", "provenance",
    "architecture", "export", "stored", "declared", "folder", "every", "beat",
    "init", "device", "group", "prefix", "names", "keep_initial_lr", "prove", "rules", "constants",
    "keys",
]  # fmt: skip
"""Each has one meaning, which docstrings say; a new one is added where none of these fits."""
NAMESPACES = (mu, mu.budgets, mu.diagnostics, mu.errors, mu.plans, mu.rules, mu.studies, mu.trainers)


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and the classes that are called with what the user has; records are not among them."""
    for namespace in NAMESPACES:
        for name in namespace.__all__:
            if name in ("GrowingCheckpointManager", "tune"):
                continue  # the first is called by torchtitan; the second takes its settings one by one
            thing = getattr(namespace, name)
            if inspect.isfunction(thing):
                yield name, thing
    yield "Run", mu.Run
    yield "HuggingFaceCallback", huggingface.TrainerHooks
    yield "LightningCallback", lightning.FitHooks


def strangers(function: Callable[..., Any]) -> list[str]:
    """Parameters of a function that are not among these words."""
    return [name for name in inspect.signature(function).parameters if name not in WORDS]


@pytest.mark.parametrize("function", [pytest.param(function, id=name) for name, function in callables()])
def test_public_parameters_use_the_words_of_the_list(function: Callable[..., Any]):
    assert not strangers(function)


def test_a_parameter_that_is_not_in_the_list_is_found():
    """Control."""
    assert strangers(lambda base, wide, *, blueprint=None: None) == ["blueprint"]


def test_the_list_has_each_word_once_and_no_word_that_nobody_uses():
    used = {p for _, function in callables() for p in inspect.signature(function).parameters}
    assert len(set(WORDS)) == len(WORDS)
    assert set(WORDS) - used <= {"proxy", "settings", "folder", "every", "beat"}  # of tune

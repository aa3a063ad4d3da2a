"""Public parameters use the words of one table, each with one meaning."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mupscale as mu
from mupscale.trainers import huggingface, lightning

ROOT = Path(__file__).parents[2]
WORDS = [word for word, _ in json.loads((ROOT / "docs" / "argument_words.json").read_text("utf-8"))["words"]]
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
    """Parameters of a function that are not in docs/argument_words.json."""
    return [name for name in inspect.signature(function).parameters if name not in WORDS]


@pytest.mark.parametrize("function", [pytest.param(function, id=name) for name, function in callables()])
def test_public_parameters_use_the_words_of_the_table(function: Callable[..., Any]):
    assert not strangers(function)


def test_a_parameter_that_is_not_in_the_table_is_found():
    """Control."""
    assert strangers(lambda base, wide, *, blueprint=None: None) == ["blueprint"]


def test_the_table_has_each_word_once_and_no_word_that_nobody_uses():
    used = {p for _, function in callables() for p in inspect.signature(function).parameters}
    assert len(set(WORDS)) == len(WORDS)
    assert set(WORDS) - used <= {"proxy", "settings", "folder", "every", "beat"}  # of tune

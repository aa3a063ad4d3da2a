"""Public parameters use the words of one table, each with one meaning and in one order."""

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
MIRRORED = {"narrow": {"base": "wide", "wide": "base"}}
"""The way back of widen: its two ends trade places."""
NAMESPACES = (mu, mu.diagnostics, mu.plans, mu.rules, mu.trainers, mu.tuning)


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


def faults_of(name: str, function: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    strangers = [p.name for p in parameters if p.name not in WORDS]
    faults = [f"{name}({word}=) is not in docs/argument_words.json" for word in strangers]
    for keyword_only in (False, True):
        spelled = [
            MIRRORED.get(name, {}).get(p.name, p.name)
            for p in parameters
            if (p.kind is p.KEYWORD_ONLY) == keyword_only and p.name in WORDS
        ]
        if sorted(spelled, key=WORDS.index) != spelled:
            faults.append(f"{name}{tuple(spelled)} is in another order than docs/argument_words.json")
    return faults


@pytest.mark.parametrize(("name", "function"), [pytest.param(*c, id=c[0]) for c in callables()])
def test_public_parameters_use_the_table_in_its_order(name: str, function: Callable[..., Any]):
    assert not faults_of(name, function)


def test_a_stranger_and_a_wrong_order_are_caught():
    """Controls."""
    assert faults_of("widen", lambda base, wide, *, blueprint=None: None)
    assert faults_of("widen", lambda wide, base, *, plan=None: None)
    assert faults_of("verify", lambda base, wide, *, plan=None, loss=None: None)
    assert faults_of("narrow", lambda base, wide, *, plan=None: None)
    assert not faults_of("widen", lambda base, wide, *, plan=None: None)


def test_the_table_has_each_word_once_and_no_word_that_nobody_uses():
    used = {p for _, function in callables() for p in inspect.signature(function).parameters}
    assert len(set(WORDS)) == len(WORDS)
    assert set(WORDS) - used <= {"proxy", "settings", "folder", "every", "beat"}  # of tune


def test_the_reference_page_prints_the_table():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for word, meaning in json.loads((ROOT / "docs" / "argument_words.json").read_text("utf-8"))["words"]:
        assert f"| `{word}` | {meaning} |" in page

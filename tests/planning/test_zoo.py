"""The benchmark of the zoo: its models and situations, what counts as failed, and how its lines are kept."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import mupscale as mu
from harness.loops import LOOPS
from harness.loops import results as loops
from harness.loops.measure import WORDS, Found, Tried, heard, judged, measure
from harness.loops.situation import Exact as Continued
from harness.loops.situation import Refused, Situation, Warned
from harness.zoo import ZOO
from harness.zoo import results as zoo
from harness.zoo.entry import Exact, Impossible, Open
from harness.zoo.measure import Line, Outcome

GOOD = {"models": 9, "exact": 8, "silent": 0, "remedy_wrong": 0, "false_alarms": 0, "share": 0.9}


def test_the_zoo_is_large_and_judged():
    assert len([entry for entry in ZOO.values() if not entry.needs]) >= zoo.MODELS
    kinds = [type(entry.judgement) for entry in ZOO.values()]
    assert {Exact, Impossible, Open} == set(kinds)
    assert all(isinstance(e.judgement, Impossible) for e in ZOO.values() if e.dropout)


def test_the_quick_part_needs_no_library():
    assert len(set(zoo.QUICK)) == len(zoo.QUICK) >= 25
    assert not [name for name in zoo.QUICK if ZOO[name].needs]


@pytest.mark.parametrize(
    ("mode", "change"),
    [
        ("paths", {"silent": 1}),
        ("paths", {"remedy_wrong": 1}),
        ("paths", {"false_alarms": 1}),
        ("paths", {"share": zoo.SHARE - 0.01}),
        ("control", {"silent": zoo.CONTROL - 1}),
        ("prove", {"exact": 8, "models": 9}),
        ("prove", {"false_alarms": 1, "exact": 9}),
    ],
)
def test_a_bound_that_is_missed_fails(mode: str, change: dict[str, float]):
    numbers = {**GOOD, **({"silent": zoo.CONTROL} if mode == "control" else {"exact": 9})}
    assert not list(zoo.failures(numbers, mode, quick=False, whole=True))
    assert list(zoo.failures({**numbers, **change}, mode, quick=False, whole=True))


def line(**paths: str) -> Line:
    return Line("mlp_gelu", "paths", "float64", {path: Outcome(kind) for path, kind in paths.items()})


def test_a_silent_path_weighs_more_than_an_exact_one():
    assert line(plain="refused", loss="exact").kind == "exact"
    assert line(plain="silent", loss="exact").kind == "silent"
    assert line(plain="refused", loss="crashed").kind == "refused"
    wrong = Line(
        "mlp_gelu", "paths", "float64", {"remedy of plain": Outcome("wrong"), "plain": Outcome("refused")}
    )
    assert (wrong.kind, wrong.remedy_wrong) == ("refused", True)


def test_lines_are_kept_until_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "STORED", tmp_path / "zoo.jsonl")
    assert zoo.stored("now") == {}
    zoo.store(line(plain="silent"), "now")
    zoo.store(line(plain="exact"), "now")
    assert [kept.kind for kept in zoo.stored("now").values()] == ["exact"]
    assert zoo.stored("later") == {}


def test_the_share_counts_what_can_be_exact():
    entries = [ZOO["mlp_gelu"], ZOO["mlp_dropout"]]
    dropped = Line("mlp_dropout", "paths", "float64", {"plain": Outcome("dropout")})
    numbers = zoo.summary([line(plain="exact"), dropped], entries)
    assert (numbers["share"], numbers["models"], numbers["dropout"]) == (1, 2, 1)
    assert zoo.summary([line(plain="refused"), dropped], entries)["share"] == 0


def test_the_situations_are_many_and_show_every_pattern_of_the_review():
    assert len(LOOPS) >= loops.SITUATIONS
    patterns = {f"S{n}" for n in range(1, 17)} | {"W1", "W2", "W3"} | {f"T{n}" for n in range(1, 6)}
    assert {situation.pattern for situation in LOOPS.values()} - {""} == patterns
    refused = [s for s in LOOPS.values() if isinstance(s.judgement, Refused)]
    assert all(s.typed is not None for s in refused), "what is refused has a remedy"


def verdict(judgement: Continued | Warned | Refused, first: Tried, typed: float | None = None) -> str:
    """The verdict of a situation whose remedy, if there is one, misses by `typed`."""
    remedy = None if typed is None else lambda: typed
    return judged(Situation("a", lambda: 0.0, judgement, "", remedy), first)[0]


def test_what_is_not_as_it_should_be_is_counted():
    """A good end, and next to it the nearest bad ones."""
    exact, warned, silent = Tried("exact", 0.0), Tried("warned", 0.1), Tried("silent", 0.1)
    refused = Tried("refused", error=mu.MupscaleError("write by='units'", code="plan.short"))
    assert verdict(Continued(), exact) == ""
    assert verdict(Continued(), silent) == verdict(Warned(), silent) == "silent"
    assert verdict(Continued(), warned) == verdict(Continued(), refused) == "false_alarms"
    assert verdict(Continued(("eps",)), Tried("exact", 0.0, provenance="p")) == "silent"
    assert verdict(Warned(), warned) == ""
    assert verdict(Warned(), Tried("warned", 0.0)) == "false_alarms"
    assert verdict(Warned(), refused) == verdict(Refused("plan.short"), exact) == "other"
    assert verdict(Warned(), Tried("crashed")) == "crashed"
    assert verdict(Refused("plan.short", "by='units'"), refused, typed=0.0) == ""
    assert verdict(Refused("plan.long"), refused, typed=0.0) == "other"
    for judgement, typed in (
        (Refused("plan.short", "by='copies'"), 0.0),
        (Refused("plan.short"), 0.1),
        (Refused("plan.short"), None),
    ):
        assert verdict(judgement, refused, typed) == "remedy_wrong"


def test_a_count_that_is_not_zero_fails():
    numbers = {"situations": loops.SITUATIONS, **dict.fromkeys(WORDS, 0), "control": loops.CONTROL}
    assert not list(loops.failures(numbers, [Found("a", "exact")], whole=True))
    for change in ({word: 1} for word in WORDS):
        assert list(loops.failures({**numbers, **change}, [], whole=False))
    for word in ("situations", "control"):
        assert list(loops.failures({**numbers, word: numbers[word] - 1}, [], whole=True))
    assert list(loops.failures(numbers, [Found("a", "exact", "other")], whole=False))
    found = [Found("a", "silent", "silent"), Found("b", "exact")]
    assert loops.summary(found, found) == {
        "situations": 2,
        **dict.fromkeys(WORDS, 0),
        "silent": 1,
        "control": 1,
    }


def test_only_warnings_of_the_package_are_heard():
    with heard() as said:
        warnings.warn("of a user", stacklevel=1)
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1).step()
        assert said == []
        mu.GrowthSchedule(100).grown(90, step_cost=2.0)
    assert len(said) == 1


@pytest.mark.parametrize(
    "name", ["gradient_scaled_by_a_hook", "gradients_of_a_micro_batch_wait", "counter_in_a_dict"]
)
def test_a_situation_is_silent_when_nothing_is_carried(name: str):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert (measure(LOOPS[name]).kind, measure(LOOPS[name], control=True).kind) == ("exact", "silent")
    finally:
        torch.set_default_dtype(before)

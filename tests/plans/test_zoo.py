"""The benchmark of the zoo: its models, what counts as failed, and how its lines are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

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

"""What the stored lines of much-used model types must show: each kind of wrong line is found."""

import pytest

pytest.importorskip("transformers")

from harness.popular import STORED_UNITS, VERDICTS, faults, stored, summary
from harness.popular_types import POPULAR

GOOD = stored()


def changed(name, **fields):
    """The stored lines with some fields of one of them replaced; a field of None is left out."""
    line = {**GOOD[name], **fields}
    return {**GOOD, name: {field: value for field, value in line.items() if value is not None}}


def test_the_stored_lines_hold():
    assert faults(GOOD) == []
    assert "types=115 " in summary(GOOD.values())
    assert summary(GOOD.values()).endswith(" crashed=0 slow=0")


def refused(why):
    return {"verdict": "refused", "why": why, "worst": None, "control": None}


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("llama", {"verdict": "crashed", "why": "KeyError"}, "crashed: KeyError"),
        ("llama", {"verdict": "slow", "why": "more than 60 CPU seconds"}, "slow: more than 60"),
        ("llama", {"verdict": "good"}, "good"),
        ("llama", {"seconds": 60.5}, "60.5 CPU seconds"),
        ("llama", {"seconds": float("nan")}, "nan CPU seconds"),
        ("llama", {"worst": 1e-9}, "off by 1e-09"),
        ("llama", {"worst": float("nan")}, "off by nan"),
        ("llama", {"worst": None}, "off by None"),
        ("llama", {"control": 1e-12}, "control is off by 1e-12 only"),
        ("llama", {"control": None}, "control is off by None only"),
        ("llama", {"why": "no exact plan"}, "exact, and yet refused"),
        ("llama", {"verdict": "ffn_only"}, "no reason"),
        ("llama", refused("no exact plan"), "without a remedy, and not by nature"),
        ("llava", {"towers": {"vision": 1e-15}}, "its text tower is off by None"),
        ("llava", {"towers": {"text": 1e-15, "vision": 1e-3}}, "its vision tower is off by 0.001"),
    ],
)
def test_a_wrong_line_is_found(name, fields, said):
    (fault,) = faults(changed(name, **fields))
    assert fault.startswith(f"{name}: ")
    assert said in fault


@pytest.mark.parametrize("why", ["by nature: its table is computed", "no plan; write -k ffn=2"])
def test_a_refusal_with_a_reason_or_a_remedy_is_no_fault(why):
    assert faults(changed("llama", **refused(why))) == []


def test_types_that_are_missing_or_unknown_are_found():
    assert faults({n: line for n, line in GOOD.items() if n != "llama"}) == ["llama: not measured"]
    assert faults({**GOOD, "lama": GOOD["llama"]}) == ["lama: not a type of the list"]


def test_too_few_exact_types_are_found():
    few = {n: {**line, **refused("by nature")} for n, line in GOOD.items()}
    assert faults(few) == ["0 types are exact, expected 105"]


UNITS = {"verdict": "units", "worst": 1e-14, "jump": 0.0, "control": 0.1, "why": ""}
TRIED = {"verdict": "refused", "why": "no plan", "tried": {"2": 1e-14}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"verdict": "copies"}, None),
        ({"verdict": "silent"}, "silent"),
        ({"verdict": "jumps", "jump": 1e-3}, "jumps"),
        ({"worst": 1e-9}, "asleep off by 1e-09"),
        ({"jump": 1e-9}, "moves by 1e-09"),
        ({"jump": float("nan")}, "moves by nan"),
        ({"control": 1e-12}, "control is off by 1e-12"),
        (TRIED, None),
        ({**TRIED, "why": ""}, "without a reason"),
        ({**TRIED, "tried": {"2": 1e-3}}, "is off: {'2': 0.001}"),
        ({**TRIED, "tried": {}}, "nothing by copies is exact"),
    ],
)
def test_a_wrong_line_of_new_units_is_found(fields, said):
    lines = {case.name: UNITS for case in POPULAR}
    assert faults(lines, "units") == []
    found = faults({**lines, "llama": {**UNITS, **fields}}, "units")
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_too_few_types_by_new_units_are_found():
    few = {case.name: {**UNITS, "verdict": "copies"} for case in POPULAR}
    assert faults(few, "units") == ["0 types are grown by units, expected 95"]
    assert summary(few.values(), "units").startswith("types=115 units=0 mixed=0 copies=115 refused=0 jumps=0")
    assert {line["verdict"] for line in stored(STORED_UNITS).values()} <= set(VERDICTS["units"])

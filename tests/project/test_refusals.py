"""Every refusal has a code of a known topic, and the page of refusals has the words of the source."""

import pickle
import re
from pathlib import Path

import pytest
from torch import nn

import mupscale as mu
from docs.refusal_sites import PACKAGE, TOPICS, faults
from docs.refusals import refusals
from mupscale.errors import TYPES, Fault

CARRIED = {
    ("families/config/checks.py", "code"),
    ("families/types/into.py", "code"),
    ("families/child.py", "*fault"),
    ("sharded/agreement.py", "*fault"),
}
"""Codes that stand elsewhere next to their words, in a table or in what another process said."""


def lawless(found: list[tuple[str, str]]) -> list[str]:
    """Refusals whose code is neither a literal, nor that of another refusal, nor one of those that are carried."""
    return [
        f"{place}: {written or 'no code'}"
        for place, written in found
        if not re.fullmatch(r"\w+\.code", written) and (place.partition(":")[0], written) not in CARRIED
    ]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with one good refusal of each kind."""
    (tmp_path / "words.py").write_text('REMEDY = "write 2"\n')
    (tmp_path / "good.py").write_text(
        "from .words import REMEDY\n\n\n"
        "def check(size, path):\n"
        '    what = f"it is {size!r}, expected 2"\n'
        '    raise_faults("this does not fit", [Fault("axis.not_two", "size", what, REMEDY)])\n'
        '    raise MupscaleError(f"{path} is empty; name another", code="file.empty")\n'
    )
    return tmp_path


def test_every_refusal_has_a_code():
    """And every exception that is listed above is used."""
    found = faults(PACKAGE)
    assert not lawless(found), "\n".join(lawless(found))
    assert {(place.partition(":")[0], written) for place, written in found} >= CARRIED


@pytest.mark.parametrize(
    "line",
    [
        'raise MupscaleError("the file is empty")',
        'raise MupscaleError("the file is empty", code="")',
        'raise MupscaleError("the file is empty", code=made_up())',
        'Fault("size", "it is 3", "write 2")',
        'Fault("no_such_topic.too_large", "size", "it is 3")',
        'Fault("axis.Too_Large", "size", "it is 3")',
        'Fault("axis", "size", "it is 3")',
        'Fault("axis.too_large" if x else "too large", "size", "it is 3")',
        'raise Odd("the file is odd")',
    ],
)
def test_a_refusal_without_a_code_is_found(package: Path, line: str):
    """Controls; the last is a class of its own that inherits from the error."""
    assert not lawless(faults(package))
    (package / "bad.py").write_text(f"class Odd(MupscaleError): ...\n\n\n{line}\n")
    assert [place.partition(":")[0] for place in lawless(faults(package))] == ["bad.py"]


def test_the_page_has_the_words_of_the_source(package: Path):
    """Control: another word in one message makes it differ."""
    page = refusals(package)
    assert r"| `axis.not_two` | it is \{…}, expected 2 | write 2 | this does not fit |" in page
    assert r"| `file.empty` | \{…} is empty | name another | |" in page
    (package / "words.py").write_text('REMEDY = "pass 2"\n')
    changed = refusals(package)
    assert changed != page
    assert changed == page.replace("write 2", "pass 2")


PAGE = (Path(__file__).parents[2] / "docs" / "refusals.md").read_text(encoding="utf-8")


def test_every_topic_is_used():
    assert set(re.findall("^## ([a-z]+)$", PAGE, re.M)) == TOPICS.keys()


def test_every_type_names_codes_and_topics_that_exist():
    """And none is named twice, so the order of the table means nothing."""
    named = [word for words in TYPES.values() for word in words.split()]
    known = {*TOPICS, *re.findall(r"^\| `([a-z0-9_.]+)`", PAGE, re.M)}
    assert not [word for word in named if word not in known]
    assert len(named) == len(set(named))


def own(n: int) -> nn.Module:
    class Own(nn.Linear): ...

    return Own(3, n)


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (mu.errors.NotExact, lambda: mu.grow(nn.Linear(3, 4), nn.Linear(3, 6))),
        (mu.errors.Undecided, lambda: mu.grow(own(4), own(8))),
        (mu.errors.WrongArgument, lambda: mu.grow(own(4), own(8), loss=3)),  # type: ignore[arg-type]
        (mu.errors.DamagedFile, lambda: mu.Plan.from_json("{}")),
    ],
)
def test_what_is_refused_has_a_type_that_is_caught(kind: type[mu.MupscaleError], action):
    with pytest.raises(kind) as caught:
        action()
    error = caught.value
    assert isinstance(error, ValueError) == (kind is mu.errors.WrongArgument)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.codes, str(again)) == (type(error), error.codes, str(error))
    others = [other for other in TYPES if other is not kind]
    assert not isinstance(error, tuple(others)), "control: it has none of the other types"


def test_an_error_is_undecided_only_if_all_of_it_is():
    """Who adds a loss to an error that is undecided must not meet the rest of it again."""
    open_, wrong = (Fault(code, "w", "it is 3") for code in ("layout.undeclared", "axis.not_whole_copies"))
    assert type(mu.MupscaleError("no", [open_, open_])) is mu.errors.Undecided
    for order in ([open_, wrong], [wrong, open_]):
        assert type(mu.MupscaleError("no", order)) is mu.errors.NotExact
    assert type(mu.MupscaleError("no", code="disk.is_full")) is mu.MupscaleError

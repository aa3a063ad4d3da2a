"""Public names: few, with type hints that resolve, and with one entry each on the reference page."""

import inspect
import re
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest

import mupscale as mu
from mupscale.lazy import EARLIER
from mupscale.trainers.torchtitan import Growing

ROOT = Path(__file__).parents[2]
NAMESPACES = (mu, mu.budgets, mu.diagnostics, mu.errors, mu.plans, mu.rules, mu.studies, mu.trainers)
NAMES = [(namespace, name) for namespace in NAMESPACES for name in namespace.__all__]
IDS = [f"{namespace.__name__}.{name}" for namespace, name in NAMES]
UNLISTED = [
    f"{namespace.__name__}.{name}" for namespace in NAMESPACES for name in getattr(namespace, "_unlisted", ())
]
"""What can be imported and is in no list: types of results, for annotations."""
MOST = 26
"""Names for growing and training; a further purpose needs a list of its own."""
COMPARING = ("same",)
"""Names for those who compare checkpoints and may never grow one."""
MOST_IN_ALL = 60
"""Names of all namespaces; what only this library and its own programs use is imported from its module."""


def public(namespace: ModuleType, name: str) -> Any:
    # Its other half is torchtitan's, which may not be installed.
    return Growing if name == "GrowingCheckpointManager" else getattr(namespace, name)


@pytest.mark.parametrize(("namespace", "name"), NAMES, ids=IDS)
def test_the_type_hints_of_every_public_name_resolve(namespace: ModuleType, name: str):
    """Whoever reads hints at run time, as pydantic and typer do, needs the names of a function's module."""
    thing = public(namespace, name)
    called = [thing, thing.__init__] if inspect.isclass(thing) else [thing] * inspect.isroutine(thing)
    for one in called:
        typing.get_type_hints(one)


def test_a_hint_that_is_imported_for_type_checkers_alone_is_caught():
    def names(plan: "OnlyForTypeCheckers") -> None:  # type: ignore[name-defined]  # noqa: F821
        raise NotImplementedError

    with pytest.raises(NameError):
        typing.get_type_hints(names)


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_name_leads_to_one_that_exists_and_stands_on_the_page(name: str):
    space, _, last = name.rpartition(".")
    with pytest.raises(AttributeError, match=re.escape(EARLIER[name])):
        getattr(import_module(space), last)
    assert resolve_name(EARLIER[name])
    attribute = EARLIER[name].rpartition(".")[2]
    row = rf"^\|.*`(mu\.\w+\.|mu\.)?{last}`.* \|.*{attribute}"
    assert re.search(row, (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8"), re.M)


def test_the_reference_has_one_entry_for_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: (mupscale(?:\.\w+)*)$", page, re.M)
    entries = [entry for entry in entries if not entry.endswith("Hooks") and not entry.endswith("Growing")]
    entries += re.findall(r"^### \w+ \{#(mupscale\.\w+\.\w+)\}$", page, re.M)
    assert sorted(entries) == sorted(IDS + UNLISTED)
    assert f"{len(mu.__all__)} names" in page
    assert f"and {len(IDS) - len(mu.__all__)} more are in" in page


def reachable(code: str = "") -> list[str]:
    """Names that are `mu.name`, asked for or not, in a fresh process; modules are no names."""
    code = f"""
import types, mupscale as mu
{code}
names = {{*dir(mu), *mu.__all__}}
print(*(n for n in names if not n.startswith("_") and not isinstance(getattr(mu, n), types.ModuleType)))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.split()


def test_few_names_are_reachable_from_the_top():
    assert sorted(reachable()) == sorted(mu.__all__)
    assert len({*mu.__all__} - {*COMPARING}) <= MOST
    assert {*COMPARING} <= {*mu.__all__}
    assert len(NAMES) <= MOST_IN_ALL


def test_what_is_not_listed_can_be_imported():
    """Control: another name is not found."""
    code = "import mupscale as mu; from mupscale.rules import Axis; print(mu.rules.Axis is Axis, 'Axis' in dir(mu.rules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["True", "False"]
    with pytest.raises(AttributeError):
        mu.rules.Axes  # noqa: B018


def test_a_name_that_leaks_into_the_top_is_seen():
    """Control."""
    assert "widened" in reachable("mu.widened = mu.grow")

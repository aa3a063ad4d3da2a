"""Every public name says what it claims and shows a line that runs, and the reference page has one entry for it."""

import ast
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import mupscale as mu

ROOT = Path(__file__).parents[2]
CALLBACKS = ("HuggingFaceCallback", "LightningCallback")  # not in __all__, which `import *` would fetch
NAMES = [*mu.__all__, *CALLBACKS]


def described(name: str) -> str:
    """The docstring of a class or function, or the string under the assignment of a constant."""
    thing = getattr(mu, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return inspect.cleandoc(thing.__doc__ or "")
    body = ast.parse(inspect.getsource(sys.modules[type(thing).__module__])).body
    for assignment, after in pairwise(body):
        if isinstance(assignment, ast.Assign) and ast.unparse(assignment.targets[0]) == name:
            return str(ast.literal_eval(after.value)) if isinstance(after, ast.Expr) else ""
    return ""


def faults_of(text: str, constant: bool) -> list[str]:
    claim = text.partition("\n")[0]
    faults = [] if re.fullmatch(r"(?!\w+\()[A-Z`].*[.!]", claim) else [f"opens with no claim: {claim!r}"]
    return faults + ([] if constant or "\n>>> " in text else ["shows no line that runs"])


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_claims_something_and_shows_it(name):
    thing = getattr(mu, name)
    constant = not (inspect.isclass(thing) or inspect.isroutine(thing))
    assert not faults_of(described(name), constant)


@pytest.mark.parametrize(
    "text",
    ["", "Row(name: 'str', size: 'int')", "builds a plan", "A plan.\n\nWithout an example."],
)
def test_what_says_nothing_is_caught(text):
    """Controls: no docstring, a dataclass's own, no sentence, no example."""
    assert faults_of(text, constant=False)


def test_the_reference_has_one_entry_for_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = re.findall(r"^::: mupscale\.(\w+)$", page, re.M)
    entries += re.findall(r"^### (\w+) \{#mupscale\.\w+\}$", page, re.M)
    assert sorted(entries) == sorted(NAMES)

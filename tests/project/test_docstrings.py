"""Every public docstring: a claim, each argument once, what is returned and what is refused, and an example that runs."""

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import EnumType
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

import mupscale as mu
from mupscale.errors import MupscaleError, raise_faults
from mupscale.trainers import huggingface, lightning, torchtitan

NAMESPACES = (mu, mu.budgets, mu.diagnostics, mu.errors, mu.plans, mu.rules, mu.studies, mu.trainers)
NAMES = [(space, name) for space in NAMESPACES for name in (*space.__all__, *getattr(space, "_unlisted", ()))]
IDS = [f"{namespace.__name__}.{name}" for namespace, name in NAMES]
HALVES = {
    "GrowingCheckpointManager": torchtitan.Growing,
    "HuggingFaceCallback": huggingface.TrainerHooks,
    "LightningCallback": lightning.FitHooks,
}
READ = {name for space in NAMESPACES for name in getattr(space, "_unlisted", ())}
"""Classes that are in no list of names. Their methods are used inside the package, and a claim is enough."""
SECTION = re.compile(r"^(\w+):\n((?:    .*(?:\n|\Z)|\n(?=    ))+)", re.M)
"""A section of Google's style: its heading, and the indented lines below it."""
ENTRY = re.compile(r"^    \*{0,2}(\w[\w.]*): \S", re.M)
"""An entry of a section: one level of indentation, the name, a colon, and words on the same line."""


def public(namespace: ModuleType, name: str) -> Any:
    """What a name stands for; of a class with another library's class as its other half, ours."""
    return HALVES.get(name) or getattr(namespace, name)


def is_code(thing: Any) -> bool:
    """Whether it is a class or a function, and not a constant."""
    return inspect.isclass(thing) or inspect.isroutine(thing)


def described(thing: Any, name: str) -> str:
    """The docstring of a class or function, or the string under the assignment of a constant."""
    if is_code(thing):
        return inspect.cleandoc(thing.__doc__ or "")
    ours = {path: module for path, module in sys.modules.items() if path.startswith("mupscale.")}
    for module in (module for module in ours.values() if vars(module).get(name) is thing):
        for assignment, after in pairwise(ast.parse(inspect.getsource(module)).body):
            if isinstance(assignment, ast.Assign) and ast.unparse(assignment.targets[0]) == name:
                return str(ast.literal_eval(after.value)) if isinstance(after, ast.Expr) else ""
    return ""


def sections(text: str) -> dict[str, list[str]]:
    """The sections of a docstring, and the names of their entries.

    >>> sections("Adds.\\n\\nArgs:\\n    a: One.\\n    b: Another,\\n        as long.\\n\\nReturns:\\n    Their sum.\\n")
    {'Args': ['a', 'b'], 'Returns': []}
    """
    return {heading: ENTRY.findall(block) for heading, block in SECTION.findall(text)}


def parameters(thing: Any) -> list[str]:
    """What a caller passes. A class that is made as its base is, or an enumeration, says nothing of its own."""
    own = not inspect.isclass(thing) or {"__init__", "__new__"} & vars(thing).keys()
    if not own or isinstance(thing, EnumType):
        return []
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def fields(thing: Any) -> list[str]:
    """The fields of a dataclass with a string below them, which documents them in place of Args."""
    if not is_dataclass(thing):
        return []
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body  # type: ignore[arg-type]
    assert isinstance(tree, ast.ClassDef)
    with_text = [
        ast.unparse(field.target)
        for field, after in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)
    ]
    return [name for name in with_text if name in parameters(thing)]


@cache
def calls_of(module: str) -> dict[str, set[str]]:
    """What each function of a file calls, and what each class calls when it is made."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        parts = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):
            parts = [
                n
                for n in node.body
                if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__post_init__")
            ]
        for part in parts:
            called = {ast.unparse(n.func) for n in ast.walk(part) if isinstance(n, ast.Call)}
            found.setdefault(node.name, set()).update(called)  # type: ignore[attr-defined]
    return found


def refuses(thing: Any) -> bool:
    """Whether its code, or a function of its own file that it calls, raises an error of the package."""
    known, names = calls_of(thing.__module__), vars(sys.modules[thing.__module__])
    seen = {thing.__name__}
    waiting = {*known.get(thing.__name__, ())} - seen
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= known.get(name, set()) - seen
        found = names.get(name)
        if found is raise_faults or (inspect.isclass(found) and issubclass(found, MupscaleError)):
            return True
    return False


def methods(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines, as functions."""
    for name, value in vars(thing).items() if inspect.isclass(thing) else ():
        if not name.startswith("_") or name == "__call__":
            inner = (
                getattr(value, "fget", None)
                or getattr(value, "func", None)
                or getattr(value, "__func__", value)
            )
            if inspect.isfunction(inner):
                yield name, inner


def misdescribed(
    found: Mapping[str, list[str]], passed: Sequence[str], apart: Sequence[str] = ()
) -> Iterator[str]:
    """Arguments that are described never or twice, and those that there are not; `apart` are described elsewhere.

    The fields of a NamedTuple are its attributes: mkdocstrings sees no function that takes them.
    """
    times = Counter([*found.get("Args", ()), *found.get("Attributes", ()), *apart])
    yield from (f"describes {n} {times[n]} times" for n in passed if times[n] != 1)
    yield from (f"describes {n}, which it does not take" for n in times if n not in passed)
    yield from (
        f"has a section {heading}" for heading in found.keys() - {"Args", "Attributes", "Returns", "Raises"}
    )


def faults_of(thing: Any, name: str) -> Iterator[str]:
    """What a docstring lacks, or says too often."""
    text = described(thing, name)
    yield from unclaimed(text)
    if not is_code(thing):
        return
    found = sections(text)
    yield from misdescribed(found, parameters(thing), fields(thing))
    if inspect.isfunction(thing):
        returns = inspect.signature(thing).return_annotation
        if (returns not in (None, "None")) != ("Returns" in found):
            yield f"returns {returns}, and says otherwise"
    if refuses(thing) and not found.get("Raises"):
        yield "does not say what it refuses"
    if "\n>>> " not in text:
        yield "shows no line that runs"
    # Hooks are called by trainers, with what their own documentation says.
    for method, function in methods(thing) if thing not in HALVES.values() else ():
        own = inspect.cleandoc(function.__doc__ or "")
        yield from (f"{method} {fault}" for fault in unclaimed(own))
        if thing.__name__ not in READ:
            yield from (f"{method} {fault}" for fault in misdescribed(sections(own), parameters(function)))


def unclaimed(text: str) -> Iterator[str]:
    claim = text.partition("\n")[0]
    if not re.fullmatch(r"(?!\w+\()[A-Z`].*[.!]", claim):
        yield f"opens with no claim: {claim!r}"


@pytest.mark.parametrize(("namespace", "name"), NAMES, ids=IDS)
def test_every_public_docstring_says_what_it_does_takes_returns_and_refuses(namespace: ModuleType, name: str):
    assert not [*faults_of(public(namespace, name), name)]


def planted(size: int, *names: str, **options: Any) -> int:
    """Add a size to how many names there are.

    Args:
        size: A number.
        *names: What is counted.
        **options: Of no use.

    Returns:
        The sum.

    Raises:
        MupscaleError: If the size is negative.

    >>> planted(1, "a")
    2
    """
    if size < 0:
        raise MupscaleError("no size is negative", code="argument.negative")
    return size + len(names)


def test_a_whole_docstring_has_no_fault():
    assert not [*faults_of(planted, "planted")]


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("Add a size to how", "adds a size to how"),
        ("    size: A number.\n", ""),
        ("    size: A number.\n", "    size: A number.\n    size: The same number.\n"),
        ("    size: A number.\n", "    size: A number.\n    sizes: Another.\n"),
        ("    **options: Of no use.\n", ""),
        ("Returns:\n    The sum.\n\n", ""),
        ("Raises:\n    MupscaleError: If the size is negative.\n\n", ""),
        ("Raises:", "Refuses:"),
        (">>> planted", "planted"),
    ],
)
def test_what_lacks_a_part_is_reported(monkeypatch, there, instead):
    """Controls: each part is left out, or said twice, or of something that is not there."""
    whole = inspect.cleandoc(planted.__doc__ or "")
    assert there in whole
    monkeypatch.setattr(planted, "__doc__", whole.replace(there, instead))
    assert [*faults_of(planted, "planted")]


class Planted:
    """Have a size.

    >>> Planted(1).size
    1
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def grown(self, by: int) -> int:
        """Its size, and more."""
        return self.size + by

    def shrunk(self) -> int:
        return self.size - 1


def test_a_class_that_does_not_describe_what_it_takes_is_reported():
    """Control: nor do its methods, one of which says nothing at all."""
    faults = ["describes size 0 times", "grown describes by 0 times", "shrunk opens with no claim: ''"]
    assert [*faults_of(Planted, "Planted")] == faults

"""Every public docstring: a claim, each argument once, what is returned, what is refused, and an example that runs."""

import ast
import builtins
import importlib
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import pytest

import mupscale as mu
from mupscale.trainers.torchtitan import Growing

NAMESPACES = (mu, mu.budgets, mu.diagnostics, mu.errors, mu.plans, mu.rules, mu.studies, mu.trainers)
NAMES = [(namespace, name) for namespace in NAMESPACES for name in namespace.__all__]
SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:    .*(?:\n|$)|\n(?=    ))+)", re.M)
"""A section of Google's style: its heading, and the indented lines below it."""
ITEM = re.compile(r"^    \*{0,2}(\w[\w.]*): \S", re.M)
"""An entry of a section: one level of indentation, the name, a colon, and words on the same line."""


def public(namespace: ModuleType, name: str) -> Any:
    # Its other half is torchtitan's, which may not be installed.
    return Growing if name == "GrowingCheckpointManager" else getattr(namespace, name)


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

    >>> sections("Adds.\\n\\nArgs:\\n    a: One number.\\n    b: The other,\\n        as long.\\n\\nReturns:\\n    Their sum.\\n")
    {'Args': ['a', 'b'], 'Returns': []}
    """
    return {heading: ITEM.findall(block) for heading, block in SECTION.findall(text)}


def fields(thing: type) -> list[str]:
    """The fields of a class and of its bases that have a string below them, which documents them."""
    found = []
    for one in (one for one in thing.__mro__ if one.__module__.startswith("mupscale")):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                found += [ast.unparse(field.target)] * isinstance(after.value, ast.Constant)
    return found


def parameters(thing: Any) -> list[str]:
    """What a caller may pass. An error has what every error has, an enumeration nothing."""
    if inspect.isclass(thing) and issubclass(thing, (ast.Enum if False else __import__("enum").Enum,)):
        return []
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def refuses(function: FunctionType) -> bool:
    """Whether its code, or that of a function of its own file that it calls, raises an error of the package."""
    module = sys.modules[function.__module__]
    tree = ast.parse(inspect.getsource(module))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    seen: set[str] = set()
    left = [function.__name__]
    while left:
        name = left.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            raised = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(raised, ast.Call):
                called = ast.unparse(raised.func)
                if called == "raise_faults" or (isinstance(node, ast.Raise) and is_error(module, called)):
                    return True
                left.append(called)
    return False


def is_error(module: ModuleType, name: str) -> bool:
    found = getattr(module, name, None)
    return inspect.isclass(found) and issubclass(found, mu.MupscaleError)


if __name__ == "__main__":
    for ns, name in NAMES:
        thing = public(ns, name)
        if not is_code(thing): continue
        text = described(thing, name)
        s = sections(text)
        c = Counter(s.get("Args", []))
        if inspect.isclass(thing): c.update(fields(thing))
        p = parameters(thing)
        bad = [q for q in p if c[q] != 1] + ["!" + q for q in c if q not in p and "Args" in s]
        miss = []
        if inspect.isfunction(thing):
            if inspect.signature(thing).return_annotation not in (None, "None") and "Returns" not in s: miss.append("Returns")
            if refuses(thing) and "Raises" not in s: miss.append("Raises")
        if bad or miss: print(ns.__name__, name, thing.__module__, bad, miss)

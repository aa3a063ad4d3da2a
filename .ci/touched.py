"""Prints the commands of `.ci/run` that a change can touch: tests by the import graph, and quick programs.

    python .ci/touched.py REV      what has changed since REV, uncommitted files included

A file depends on the modules that it imports anywhere, also inside functions, and on what those depend on. Names of
`mupscale` that are imported when they are first used count as imports of their modules: in

    import mupscale as mu
    mu.upscale(...)

the file depends on training/grow/upscale.py and not on the whole package. Modules that are imported by a computed name (the verbs of
the command line) count as imported by whoever computes it. A changed file that is not Python touches the tests and programs
that write its name, and every test of the project's own files (tests/project).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = {"mupscale": "src/mupscale", "harness": "harness", "benchmarks": "benchmarks", "tests": "tests"}
ROOTS["reproduce"] = "reproduce"
Graph = Mapping[str, set[str]]


def files() -> list[str]:
    """Every Python file that git knows or does not ignore, from the root of the repository."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    return [name for name in listed if name.startswith(tuple(f"{r}/" for r in ROOTS.values()))]


def changed(revision: str) -> list[str]:
    return sorted(
        {*_git("diff", "--name-only", revision), *_git("ls-files", "--others", "--exclude-standard")}
    )


def _git(*words: str) -> list[str]:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()


def module_of(file: str) -> str:
    """The dotted name of a file.

    >>> module_of("src/mupscale/rules/axes.py"), module_of("harness/__init__.py")
    ('mupscale.rules.axes', 'harness')
    """
    name = file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
    return name.replace("/", ".")


def imports(file: str, source: str, known: Iterable[str], lazy: Mapping[str, str]) -> Iterator[str]:
    """Modules among `known` that a source imports; `lazy` has the names that a package imports on first use.

    >>> lazy = {"mupscale.upscale": "mupscale.training.grow.upscale"}
    >>> known = {"mupscale", "mupscale.errors", "mupscale.training.grow.upscale"}
    >>> sorted({*imports("tests/t.py", "import mupscale as mu; mu.upscale; from mupscale.errors import Fault", known, lazy)})
    ['mupscale', 'mupscale.errors', 'mupscale.training.grow.upscale']
    """
    known, tree = set(known), _without_type_checking(ast.parse(source))
    package = _package(file)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _prefixes(name.name, known)
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*above, *((node.module or "").split(".") if node.module else [])])
            yield from _prefixes(start, known)
            for name in node.names:
                full = f"{start}.{name.name}"
                yield from _prefixes(lazy.get(full, full), known)
                aliases[name.asname or name.name] = full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node) if isinstance(node.value, (ast.Name, ast.Attribute)) else ""
            first, _, rest = dotted.partition(".")
            full = f"{aliases.get(first, '')}.{rest}"
            if full in lazy or full in known:
                yield from _prefixes(lazy.get(full, full), known)


def _without_type_checking(tree: ast.Module) -> ast.Module:
    """A tree without imports that only type checkers see; the package's own names are among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]
    return tree


def _prefixes(name: str, known: set[str]) -> Iterator[str]:
    """A module and the packages above it, where they are files of this repository."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        if (prefix := ".".join(parts[:length])) in known:
            yield prefix


def lazy_names(sources: Mapping[str, str]) -> dict[str, str]:
    """Names that packages import on first use, from their blocks for type checkers.

    >>> block = "if TYPE_CHECKING:\\n    from .grow.upscale import upscale as upscale\\n__getattr__ = exported(__name__)"
    >>> lazy_names({"src/mupscale/__init__.py": block})
    {'mupscale.upscale': 'mupscale.grow.upscale'}
    """
    found = {}
    for file, source in sources.items():
        if file.startswith("src/") and "exported(__name__" in source:
            for place, name in re.findall(
                r"^    from (\.+\w[.\w]*) import (\w+) as \2$", source, re.MULTILINE
            ):
                found[f"{module_of(file)}.{name}"] = resolve_name(place, _package(file))
    return found


def _package(file: str) -> str:
    return module_of(file) if file.endswith("__init__.py") else module_of(file).rpartition(".")[0]


def graph(sources: Mapping[str, str]) -> Graph:
    """File -> the files that it imports."""
    places = {module_of(file): file for file in sources}
    lazy = lazy_names(sources)
    found = {}
    for file, source in sources.items():
        modules = set(imports(file, source, places, lazy))
        package = file.rpartition("/")[0]
        if (
            "import_module(f" in source and package != "src/mupscale"
        ):  # a computed name: any module of the same package
            modules |= {module for module, place in places.items() if place.rpartition("/")[0] == package}
        found[file] = {places[module] for module in modules} - {file}
        fixtures = (file for file in sources if file.endswith("conftest.py"))
        found[file] |= {
            place for place in fixtures if place != file and _uses(file, source, place, sources[place])
        }
    return found


def _uses(file: str, source: str, conftest: str, fixtures: str) -> bool:
    """Whether a test names a fixture of a conftest.py above it."""
    names = re.findall(r"@pytest\.fixture.*\ndef (\w+)", fixtures)
    return file.startswith(conftest.removesuffix("conftest.py")) and any(name in source for name in names)


def dependents(changes: Iterable[str], edges: Graph) -> set[str]:
    """Files that depend on a changed one, at any depth, and the changed ones."""
    users: dict[str, set[str]] = {}
    for file, used in edges.items():
        for other in used:
            users.setdefault(other, set()).add(file)
    reached, waiting = set(), list(changes)
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting += users.get(file, ())
    return reached


@cache
def programs() -> tuple[str, ...]:
    """The quick programs that run for every push, as they stand in .ci/run."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    push = script.partition("# The rest needs more time")[0]
    return tuple(re.findall(r"step (python benchmarks/\S+\.py.*)", push))


def commands(changes: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """What to run: one command for the tests, one for every program."""
    changes = list(changes)
    python = {name for name in changes if name in sources}
    others = {Path(name).name for name in changes if not name.endswith(".py")}
    mentions = {file for file, source in sources.items() if any(name in source for name in others)}
    reached = dependents(python | mentions, graph(sources))
    tests = sorted(file for file in reached if re.search(r"(^|/)test_\w+\.py$", file))
    tests += sorted(file for file in python if file.startswith("src/"))  # their doctests
    if others:
        tests.append("tests/project")
    tests += [file.rpartition("/")[0] for file in changes if file.endswith("conftest.py")]
    found = [f"python -m pytest -n 2 --dist loadfile {' '.join(dict.fromkeys(tests))}"] if tests else []
    return found + [line for line in programs() if line.split()[1] in reached]


def main(words: list[str]) -> int:
    if len(words) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files() if (ROOT / file).exists()}
    print("\n".join(commands(changed(words[0]), sources)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

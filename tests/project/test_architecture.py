"""The shape of the house: import direction, a torch-free floor, one copy of the table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "mupscale"
ORDER = [
    "rules", "tensors", "storage", "files", "models", "plans", "optimizers", "runs", "noise", "proofs", "planning",
    "training", "families", "jobs", "formats", "checkpoints", "sharded", "sameness", "trainers", "budgets", "studies", "cli",
]  # fmt: skip
INNER = {
    "planning": ["facts", "search"],
    "training": ["start", "units", "rates", "grow", "check"],
    "files": ["pickles", "dcp"],
    "jobs": ["bytes", "journal", "norms", "publish"],
    "studies": ["agenda", "directory", "report"],
}
"""The folders of rooms that have some, in order; files of the room itself may import from all of them."""
MOST_FILES = 14
"""Files of a folder, without its `__init__`: what one can keep in mind of an `ls`."""
FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = {("__init__",), ("__main__",), ("diagnostics",)}
"""The top of the package: it names what users import, so nothing inside may import it."""
Name = tuple[str, ...]
"""A module as path parts below the package: ("rules", "axes")."""


def name_of(path: Path) -> Name:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts


def room(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


MODULES = {name_of(path) for path in FILES}


def imported(text: str, here: Name) -> list[Name]:
    """Modules of this package that a file in the folder `here` imports, anywhere in its text.

    A name that is no module below a folder belongs to the folder's `__init__`; at the top that is ("__init__",).
    """
    found: list[Name] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
            found += [_module(name[1:], None) for name in names if name[0] == "mupscale"]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                parent = (*here[: len(here) - (node.level - 1)], *module)
            elif module and module[0] == "mupscale":
                parent = module[1:]
            else:
                continue
            found += [_module(parent, alias.name) for alias in node.names]
    return list(dict.fromkeys(found))


def _module(parent: Name, leaf: str | None) -> Name:
    if leaf is not None and (*parent, leaf) in MODULES:
        return (*parent, leaf)
    return parent or ("__init__",)


def imports(path: Path) -> list[Name]:
    """What a file imports when it runs: a namespace's `__init__` exports lazily, its imports are for type checkers."""
    text = path.read_text()
    if path.name == "__init__.py":
        tree = ast.parse(text)
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
        text = ast.unparse(tree)
    return imported(text, path.relative_to(PACKAGE).parts[:-1])


def floor(name: Name) -> int:
    """How high a module lies: single files at the bottom, then the rooms in order, then what users import."""
    if name in DOORS:
        return len(ORDER)
    return ORDER.index(name[0]) if name[0] in ORDER else -1


def climbs(here: Name, targets: list[Name]) -> list[Name]:
    """The imports that lead to a higher floor than the importing module is on, or to a later folder of its room."""
    return [target for target in targets if floor(target) > floor(here) or _later(here, target)]


def _later(here: Name, target: Name) -> bool:
    inner = INNER.get(here[0], []) if here and here[0] == target[0] else []
    places = [inner.index(name[1]) for name in (here, target) if len(name) > 2 and name[1] in inner]
    return len(places) == 2 and places[1] > places[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_folders_above_its_own(path):
    assert not climbs(name_of(path), imports(path))


def test_every_folder_is_a_room_with_a_place_in_the_order():
    assert {room(path) for path in FILES} - {None} == set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_can_be_read_at_once(room):
    folders = {path.parent for path in FILES if path.is_relative_to(PACKAGE / room)}
    many = {f.relative_to(PACKAGE).as_posix(): len([*f.glob("*.py")]) - 1 for f in folders}
    assert {name: count for name, count in many.items() if count > MOST_FILES} == {}


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("from .. import __version__", ("training",)),
        ("def f():\n    from ..training.recipe import Recipe", ("plans",)),
        ("from .rules.axes import Axis", ()),
        ("import mupscale.cli.main", ("rules",)),
        ("import mupscale", ("cli",)),
        ("from mupscale import Run", ("jobs",)),
        ("from ..grow.hooks import carry_clips_", ("training", "units")),
    ],
)
def test_an_import_that_climbs_is_seen(text, here):
    """Control: names of the package's top, imports inside functions, and single files are all seen."""
    assert climbs((*here, "any"), imported(text, here))
    assert not climbs((*here, "any"), imported("from __future__ import annotations\nimport torch", here))


def test_the_import_test_sees_imports():
    """Control: a file known to import from another room is seen to do so."""
    assert ("rules", "axes") in imports(PACKAGE / "tensors" / "expand.py")


def cycle(graph: dict[Name, list[Name]]) -> list[Name]:
    """A cycle of imports, or nothing."""
    done: set[Name] = set()

    def walk(name: Name, path: list[Name]) -> list[Name]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for target in graph.get(name, []):
            if found := walk(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := walk(name, []))), [])


def test_no_modules_import_each_other():
    graph = {name_of(path): [t for t in imports(path) if t != name_of(path)] for path in FILES}
    assert not cycle(graph)


def test_a_cycle_of_imports_is_seen():
    """Control: two and three modules that import each other are found, a diamond is not."""
    assert cycle({("a",): [("b",)], ("b",): [("a",)]})
    assert cycle({("r",): [("a",)], ("a",): [("b",)], ("b",): [("c",)], ("c",): [("a",)]}) == [
        ("a",),
        ("b",),
        ("c",),
    ]
    assert not cycle({("a",): [("b",), ("c",)], ("b",): [("d",)], ("c",): [("d",)]})


def test_rules_never_load_torch():
    names = [f"mupscale.rules.{p.stem}" for p in (PACKAGE / "rules").glob("*.py") if p.stem != "__init__"]
    code = (
        "import sys, types, importlib\n"
        f"package = types.ModuleType('mupscale'); package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['mupscale'] = package\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_say_what_they_know(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a file opens with what it knows"


def units_imported(text: str) -> set[str]:
    """The units that a file imports, of those that only the table of rules may use."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom))
    return {alias.name for node in nodes for alias in node.names} & {"W", "G", "FILLED"}


UNIT_ROOMS = ("optimizers", "noise", "proofs", "training", "formats", "checkpoints", "sharded", "trainers")
"""The rooms that carry weights, state and settings from one width to the other."""
WIDTHS = {
    "k", "s", "r", "c", "scale", "fold", "filled", "copies", "multiplier", "factor", "width", "wide", "narrow",
    "experts", "heads", "rows", "columns", "blocks", "fan_in", "fan_out", "k_in", "k_out",
}  # fmt: skip
"""Names of sizes that a model has at its width, and of what is made of them."""


def powers_in(text: str) -> set[str]:
    """Powers and roots of widths, outermost only: `k**b`, `s **= b`, `pow(k, b)`, `math.sqrt(axis.copies)`.

    A method of a value (`x.sqrt()`) belongs to a tensor, and sizes are no tensors.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        raised: list[ast.expr] = []
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Pow):
            raised = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
        elif isinstance(node, ast.Call):
            *owner, name = ast.unparse(node.func).split(".")
            roots = ("pow", "sqrt", "rsqrt", "isqrt", "cbrt")
            if name in roots and owner in ([], ["math"], ["np"], ["torch"]):
                raised = node.args
        inner = [part for whole in raised for part in ast.walk(whole)]
        names = {n.id for n in inner if isinstance(n, ast.Name)}
        if WIDTHS & (names | {n.attr for n in inner if isinstance(n, ast.Attribute)}):
            found.add(" ".join((ast.get_source_segment(text, node) or "").split()))
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return found


ALLOWED_POWERS = {
    "optimizers/settings.py: scale**-1",  # the inverse of a scale that the plan has
    "noise/resolve.py: float(entry.change.c / experts) ** 0.5",  # the norm of dup(W) is √c times that of W
}


def test_no_exponent_of_a_width_outside_the_table():
    """How a tensor, its state or a setting scales with the width is written in rules/ and read everywhere else."""
    named = {path.relative_to(PACKAGE).as_posix(): path for path in FILES}
    tables = [n for n, p in named.items() if room(p) and room(p) != "rules" and units_imported(p.read_text())]
    assert not tables, "units are rows of rules/"
    handling = {name: path.read_text() for name, path in named.items() if room(path) in UNIT_ROOMS}
    found = {f"{name}: {power}" for name, text in handling.items() for power in powers_in(text)}
    assert found - ALLOWED_POWERS == set(), (
        "write the exponent as a unit in rules/, or say above why it is none"
    )
    assert ALLOWED_POWERS - found == set(), "these are gone: remove them above"


@pytest.mark.parametrize(
    "planted",
    ["lr * k**-0.5", "lr / math.sqrt(entry.copies)", "scale = pow(wide, -1)", "s **= root", "axis[0].k ** 2"],
)
def test_the_exponent_test_sees_exponents(planted):
    """Control: an exponent of a width in any spelling is seen in a file that has none."""
    text = (PACKAGE / "training" / "units" / "clip.py").read_text()
    assert powers_in(text) == set()
    assert len(powers_in(f"{text}\n\ndef planted():\n    {planted}\n")) == 1
    assert units_imported(f"{text}\nfrom ..rules.units import W\n") == {"W"}


def test_the_exponent_test_passes_over_other_powers():
    """Control: powers of numbers and of measured values, and roots that tensors take of themselves."""
    text = "x = 2**64 + math.sqrt(3) + (x - mean) ** 2 + size**p + values.square().mean().sqrt()"
    assert powers_in(text) == set()

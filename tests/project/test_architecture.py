"""The shape of the house: import direction, a torch-free floor, small modules, one copy of the table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "mupscale"
ORDER = [
    "rules",
    "tensors",
    "plans",
    "training",
    "families",
    "files",
    "jobs",
    "checkpoints",
    "sharded",
    "trainers",
    "tuning",
    "reports",
    "limits",
    "cli",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def imports(path: Path) -> list[tuple[str, ...]]:
    """Modules of this package that a file imports, as path parts below the package."""
    here = path.relative_to(PACKAGE).parts[:-1]
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parent = here[: len(here) - (node.level - 1)]
            module = tuple((node.module or "").split(".")) if node.module else ()
            found += [(*parent, *module)] if module else [(*parent, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mupscale":
            found.append(tuple((node.module or "").split(".")[1:]))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_folders_above_its_own(path):
    here = room(path)
    if here is None:
        return
    for target in imports(path):
        if target and target[0] in ORDER:
            assert ORDER.index(target[0]) <= ORDER.index(here), f"{path.name} imports {'.'.join(target)}"


def test_the_import_test_sees_imports():
    """Control: a file known to import from another room is seen to do so."""
    assert ("rules", "axes") in imports(PACKAGE / "tensors" / "expand.py")


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
def test_modules_are_small_and_say_what_they_know(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400, "two ideas in one room?"
    assert ast.get_docstring(ast.parse(text)), "a file opens with what it knows"


def test_no_exponent_outside_the_table():
    """Units appear in rules/ only; everything else asks the table."""
    for path in FILES:
        if room(path) in ("rules", None):
            continue
        names = {
            alias.name
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.ImportFrom)
            for alias in n.names
        }
        assert not names & {"W", "G", "FILL"}, path

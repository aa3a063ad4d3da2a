"""The source tree as a page: every module of the package with the first line of its docstring.

The sentence about a file stands in the file and nowhere else, so renaming or adding a module asks for one command,
`python docs/generate.py`. `faults` compares a page with the files and names every missing, stale or changed line.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mupscale"
FOLDERS = {
    "benchmarks": "Every number in the docs, printed by a script with a bound.",
    "docs": "The pages of the site, and the scripts that print those which come from data.",
    "examples": "Whole programs to start from, each with its control.",
    "harness": "What tests and benchmarks share: small models, data, comparisons, launched ranks.",
    "reproduce": "The paper's experiments on real data, made with the library.",
    "src": "The package.",
    "tests": "Claims, each with its control, in the folder of the room they test.",
}
HEAD = """# Source layout

Every module of the package, with the first line of its docstring. This page is printed from the files by
`python docs/generate.py`, and a test compares them. [Contributing](contributing.md) says in which direction the rooms
import each other.
"""
NOT_RUN = "<!-- not run: a list of files, which a test compares with them -->"


def sentence(module: Path) -> str:
    """The first line of a module's docstring, which says what the file knows."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(
            f"{module}: a module begins with a docstring; its first line says what the file knows"
        )
    return text.partition("\n")[0]


def tree(package: Path = PACKAGE) -> list[str]:
    """One line per module and per room, rooms after the files beside them, each in alphabetical order."""
    files = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
    rooms = sorted(path.parent for path in package.glob("*/__init__.py"))
    lines = [f"{package.name}/  {sentence(package / '__init__.py')}", *_aligned(files, "  ")]
    for room in rooms:
        modules = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
        lines += [f"  {room.name}/  {sentence(room / '__init__.py')}", *_aligned(modules, "    ")]
    return lines


def _aligned(files: list[Path], indent: str) -> list[str]:
    width = max((len(path.name) for path in files), default=0)
    return [f"{indent}{path.name:{width}}  {sentence(path)}" for path in files]


def layout() -> str:
    """The page: folders of the repository, then the package file by file."""
    folders = [f"{name + '/':12} {text}" for name, text in FOLDERS.items()]
    blocks = [["```text", *lines, "```"] for lines in (folders, tree())]
    return "\n".join([HEAD, NOT_RUN, *blocks[0], "", NOT_RUN, *blocks[1]]) + "\n"


def faults(page: str, expected: list[str]) -> list[str]:
    """Lines of a tree that a page lacks, and lines it has for no file; empty when page and files agree."""
    start = page.find(expected[0])
    shown = page[start:].partition("\n```")[0].split("\n") if start >= 0 else []
    missing = [f"missing: {line.strip()}" for line in expected if line not in shown]
    stale = [f"stale: {line.strip()}" for line in shown if line not in expected]
    other_order = [] if missing or stale or shown == expected else ["the lines are in another order"]
    return missing + stale + other_order

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


def units_imported(text: str) -> set[str]:
    """The units that a file imports, of those that only the table of rules may use."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom))
    return {alias.name for node in nodes for alias in node.names} & {"W", "G", "FILL"}


def powers_in(text: str) -> set[str]:
    """Powers and roots as they are written, outermost only: `a**b`, `a **= b`, `pow(a, b)`, `math.sqrt(a)`, `torch.pow(a, b)`.

    Powers of literals (`2**64`) are numbers. A method of a value (`x.sqrt()`) belongs to a tensor, and sizes are no tensors.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        raised: list[ast.expr] = []
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Pow):
            raised = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
        elif isinstance(node, ast.Call):
            *owner, name = ast.unparse(node.func).split(".")
            if name in ("pow", "sqrt", "rsqrt", "isqrt", "cbrt") and owner in (
                [],
                ["math"],
                ["np"],
                ["torch"],
            ):
                raised = node.args
        if any(isinstance(inner, (ast.Name, ast.Subscript)) for part in raised for inner in ast.walk(part)):
            found.add(" ".join((ast.get_source_segment(text, node) or "").split()))
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return found


ALLOWED_POWERS = {
    "the inverse of a scale that the plan has": [
        "collapse.py: scale**-1",
        "direction.py: scale**-1",
        "state.py: scale**-1",
    ],
    "a fact about one type of module, in the table of modules": [
        "modules.py: Scale.of(size.k) ** Fraction(-1, 4)",  # torch divides logits by the root of the head size
        "modules.py: heads.fold**-1",
        "padding.py: fill ** Fraction(1, 2)",  # RMSNorm takes its mean over padding too
    ],
    "a fold that is proposed or compared; the gradient identity decides": [
        "folds.py: k**-1",
        "folds.py: k**-_ROOT",
        "folds.py: k**_ROOT",
        "infer.py: Scale.of(copies(made, made.entries[name], made.entries[name].growing[-1])) ** -1",
    ],
    "read from the row of a family": [
        'export.py: names["D"] ** -0.5',
        "symbols.py: Scale.of(k) ** Fraction(exponent)",
    ],
    "norms of copies and of Gaussian matrices": [
        "noise.py: sqrt(k / (k - 1))",  # what centring k copies takes from their variance
        "noises.py: float(entry.change.c) ** 0.5",  # the norm of dup(W) is √c times that of W
        "spectral.py: (1 / sqrt(m - 1) + 1 / sqrt(n)) ** (1 / 3)",
        "spectral.py: (sqrt(m - 1) + sqrt(n)) ** 2",
        "spectral.py: sqrt(edge + _TRACY_WIDOM_MEAN * spread)",
        "spectral.py: sqrt(m - 0.5)",
        "spectral.py: sqrt(m - 1)",
        "spectral.py: sqrt(n)",
    ],
    "norms and least squares over measured numbers": [
        "clip.py: parts.sum() ** (1 / p)",
        "clip.py: size**p",
        "coordinates.py: (x - mean) ** 2",
        "philox.py: (2 * sum(q * q for q in half) / 32768) ** 0.5",
    ],
    "random weights and losses of a proof, the same at both widths": [
        "losses.py: max(view.numel(), 1) ** 0.5",
        "models.py: max(fan, 1) ** 0.5",
    ],
    "costs, grids and drawings, which scale no tensor": [
        "flops.py: 2**stage",
        "flops.py: size**2",
        "flops.py: width**2",
        'growing.py: 1000 ** " kMGT".index(found[2] or " ")',
        "growing.py: max(parse_multipliers(chosen.multipliers).values()) ** 2",
        "maps.py: (low * high) ** 0.5",
        "maps.py: 2**p",
        "maps.py: 2**t",
        "page.py: settings.k**2",
        "study.py: torch.finfo(kind).eps ** 0.5",
        "tune.py: 2.0**power",
    ],
}
"""Why a power may stand outside rules/ -> the places, each as its file and the expression."""
# limits/ has closed forms of its own: what a width does in the limit is what that room computes.
WITHOUT_TABLE = ("rules", "limits")


def test_no_exponent_outside_the_table():
    """How a tensor, its state or a setting scales with the width is written in rules/; other powers are listed above."""
    outside = {path: path.read_text() for path in FILES if room(path) not in WITHOUT_TABLE}
    assert not [path for path, text in outside.items() if room(path) is not None and units_imported(text)]
    found = {f"{path.name}: {power}" for path, text in outside.items() for power in powers_in(text)}
    allowed = {place for places in ALLOWED_POWERS.values() for place in places}
    assert found - allowed == set(), "write the exponent as a unit in rules/, or say above why it is none"
    assert allowed - found == set(), "these are gone: remove them above"


@pytest.mark.parametrize(
    "planted",
    ["lr * k**-0.5", "lr / math.sqrt(entry.copies)", "scale = pow(wide, -1)", "s **= root", "axis[0].k ** 2"],
)
def test_the_exponent_test_sees_exponents(planted):
    """Control: an exponent in any spelling is seen in a file that has none."""
    text = (PACKAGE / "plans" / "names.py").read_text()
    assert powers_in(text) == set()
    assert len(powers_in(f"{text}\n\ndef planted():\n    {planted}\n")) == 1
    assert units_imported(f"{text}\nfrom ..rules.units import W\n") == {"W"}


def test_the_exponent_test_passes_over_numbers():
    """Control: powers of literals, and roots that tensors take of themselves, are no exponents of a width."""
    assert powers_in("x = 2**64 + math.sqrt(3) + (values.square().mean().sqrt())") == set()

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
    "storage",
    "files",
    "plans",
    "optimizers",
    "runs",
    "proofs",
    "training",
    "families",
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
    """The imports that lead to a higher floor than the importing module is on."""
    return [target for target in targets if floor(target) > floor(here)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_folders_above_its_own(path):
    assert not climbs(name_of(path), imports(path))


def test_every_folder_is_a_room_with_a_place_in_the_order():
    assert {room(path) for path in FILES} - {None} == set(ORDER)


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("from .. import __version__", ("training",)),
        ("def f():\n    from ..training.widen import widen", ("plans",)),
        ("from .rules.axes import Axis", ()),
        ("import mupscale.cli.main", ("rules",)),
        ("import mupscale", ("cli",)),
        ("from mupscale import Run", ("jobs",)),
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
def test_modules_are_small_and_say_what_they_know(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400, "two ideas in one room?"
    assert ast.get_docstring(ast.parse(text)), "a file opens with what it knows"


def units_imported(text: str) -> set[str]:
    """The units that a file imports, of those that only the table of rules may use."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom))
    return {alias.name for node in nodes for alias in node.names} & {"W", "G", "FILLED"}


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
        "collapse.py: making.scale**-1",
        "direction.py: scale**-1",
        "settings.py: scale**-1",
    ],
    "a fact about one type of module, in the table of modules": [
        "modules.py: Scale.of(size.k) ** Fraction(-1, 4)",  # torch divides logits by the root of the head size
        "modules.py: heads.fold**-1",
        "parametrized.py: Scale.of(k) ** Fraction(-1, 2)",  # weight_norm divides by the norm of a row
        "parametrized.py: Scale.of(more / k) ** Fraction(1, 2)",  # or of rows and columns
        "padding.py: filled ** Fraction(1, 2)",  # RMSNorm takes its mean over padding too
    ],
    "a fold that is proposed or compared; the gradient identity decides": [
        "absorb.py: _TEST ** float(degree)",
        "absorb.py: scale ** (1 / d / 2)",
        "absorb.py: scale ** (1 / degree)",
        "absorb.py: scale ** (1 / e / 2)",
        "copies.py: k ** Fraction(j, 4)",
        "deviation.py: f**-1",
        "deviation.py: found[i] ** Fraction(1, 2)",
        "deviation.py: k ** Fraction(j, 4)",
        "deviation.py: own**-1",
        "deviation.py: self._input_factor(call, i) ** -1",
        "proposals.py: k**exponent",
        "proposals.py: where.excess**-1",
        "folds.py: k**-1",
        "folds.py: k**-_ROOT",
        "folds.py: k**_ROOT",
        "draft.py: Scale.of(axes[dim].filled) ** power",
        "lift.py: (Scale.of(full[dim].filled) / Scale.of(small[dim].filled)) ** power",
        "infer.py: Scale.of(copies(made, made.entries[name], made.entries[name].growing[-1])) ** -1",
    ],
    "read from the row of a family": [
        'export.py: names["D"] ** -0.5',
        'into.py: symbols(base)["D"] ** -0.5',
        "symbols.py: Scale.of(k) ** Fraction(exponent)",
    ],
    "how rounding averages out over the entries of a tensor": [
        "differences.py: (self.off / self.norm) ** 0.5",
        "rounding.py: sqrt(entries)",
    ],
    "the error of a mean over seeds": ["held_out.py: sqrt(len(self.each))"],
    "norms of copies and of Gaussian matrices": [
        "noise.py: sqrt(k / (k - 1))",  # what centring k copies takes from their variance
        # a search for a size: small noise raises a loss by its square, larger noise by another power
        "auto_noise.py: sqrt(high[1] / wanted)",
        "auto_noise.py: sqrt(low[0] * high[0])",
        "auto_noise.py: (wanted / low[1]) ** power",
        "auto_noise.py: sqrt(wanted / low[1])",
        "noises.py: float(entry.change.c / experts) ** 0.5",  # the norm of dup(W) is √c times that of W
        "spectral.py: (1 / sqrt(m - 1) + 1 / sqrt(n)) ** (1 / 3)",
        "spectral.py: (sqrt(m - 1) + sqrt(n)) ** 2",
        "spectral.py: sqrt(edge + _TRACY_WIDOM_MEAN * spread)",
        "spectral.py: sqrt(m - 0.5)",
        "spectral.py: sqrt(m - 1)",
        "spectral.py: sqrt(n)",
        "spectral.py: sqrt(float(torch.linalg.eigvalsh(projected)[-1].clamp_min(0)))",
        "spectral.py: sqrt(unit)",
    ],
    "norms and least squares over measured numbers": [
        "clip.py: parts.sum() ** (1 / p)",
        "clip.py: size**p",
        "coordinates.py: (x - mean) ** 2",
        "philox.py: (2 * sum(q * q for q in half) / 32768) ** 0.5",
    ],
    "random weights and losses of a proof, the same at both widths": [
        "deeper.py: parameter[0].numel() ** 0.5",
        "losses.py: max(view.numel(), 1) ** 0.5",
        "models.py: max(fan, 1) ** 0.5",
        "projection.py: sqrt(max(1, real.numel()))",
    ],
    "costs, grids and drawings, which scale no tensor": [
        "flops.py: 2**stage",
        "flops.py: size**2",
        "flops.py: width**2",
        'widen_options.py: 1000 ** " kmgt".index(found[2] or " ")',
        "maps.py: (low * high) ** 0.5",
        "maps.py: 2**p",
        "maps.py: 2**t",
        "page.py: settings.k**2",
        "schedules.py: math.sqrt(x)",
        "study.py: torch.finfo(kind).eps ** 0.5",
        "settings.py: 2.0**power",
    ],
    "a law of the loss, fitted to finished runs": [
        "law.py: (equal / (equal + flops)) ** self.fades",
        "law.py: (middle / r.params) ** a",
        "law.py: (seen / samples(r.params, r.flops)) ** b",
        "law.py: (self.data / above) ** (1 / self.data_power)",
        "law.py: middle**a",
        "law.py: params**self.size_power",
        "law.py: seen**b",
        "law.py: seen**self.data_power",
        "law.py: sqrt(len(errors))",
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

"""Every place in the source where a refusal is made, with its code and its words, found by syntax alone.

Codes are written where a `Fault` or a `MupscaleError` is made, or in a pair (code, message) that is passed on to there. A text
that is not a literal is followed to an assignment above it, to a constant of its module or of another one, or, where a function
passes its parameters on, to the calls of that function. What is known only when the program runs is {…}.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "mupscale"
CODE = re.compile(r"([a-z]+)\.[a-z0-9]+(_[a-z0-9]+)*")
ALONE = {"more": "the number of faults that a long list leaves out"}
"""Codes without a topic."""
TOPICS = {
    "advice": "Whether growing pays, by measured laws of the loss.",
    "archive": "Archives that hold the tensors of a checkpoint.",
    "argument": "Values of arguments: types, numbers, functions.",
    "axis": "Sizes along one axis of a tensor.",
    "checkpoint": "Checkpoints of runs.",
    "clip": "Bounds on gradients.",
    "config": "Configurations of models.",
    "cost": "Counting FLOPs, and comparing what runs cost.",
    "data": "Texts and batches to train on.",
    "dcp": "torch's distributed checkpoints.",
    "deepspeed": "DeepSpeed's checkpoints and engine.",
    "depth": "Growing deeper.",
    "directory": "Directories of models, and where results are written.",
    "disk": "Space on disks.",
    "experts": "Giving a dense model experts.",
    "extra": "Packages that are not installed.",
    "factory": "Functions that build a model.",
    "family": "Kinds of models, and how their configurations grow.",
    "file": "Files.",
    "goal": "What to grow to.",
    "growth": "Growing a run.",
    "header": "Headers of files of tensors.",
    "init": "Initialising models.",
    "job": "Jobs that are resumed, and their ranks.",
    "json": "Files of JSON.",
    "kernel": "The code that fills tensors: portable, compiled or Triton.",
    "layout": "How the units of a tensor are laid out.",
    "lightning": "Lightning's checkpoints and Trainer.",
    "megatron": "Megatron's checkpoints.",
    "model": "Modules and tensors of a model.",
    "noise": "Noise that breaks the symmetry of copies.",
    "optimizer": "Optimizers, and the rules of their settings.",
    "option": "Options of commands.",
    "pickle": "Pickled files.",
    "plan": "Plans of growth.",
    "proof": "Proving that growth is exact.",
    "proxy": "The small model that a study trains.",
    "rank": "Processes of a sharded job.",
    "rates": "Learning rates.",
    "recipe": "Recipes that a study found.",
    "report": "Reports of studies.",
    "run": "Runs: a model with its optimizers and schedules.",
    "same": "Whether two checkpoints continue the same run; what a difference does to training stands where others say what to write.",
    "scale": "Factors that multiply tensors.",
    "schedule": "Schedules of settings.",
    "search": "Searching for a layout.",
    "state": "State of optimizers.",
    "store": "Object stores, and databases of studies.",
    "study": "Studies that tune noise and learning rate.",
    "torchtitan": "torchtitan's checkpoints and configuration.",
    "trainer": "Checkpoints and arguments of the Trainer of transformers.",
    "words": "More words and positions.",
}


@dataclass(frozen=True)
class Site:
    """One place in the source where a refusal is made; `code` is None where it is not a literal."""

    file: str
    line: int
    code: str | None
    expression: str
    """The code as it is written."""
    message: str
    remedy: str
    claim: str


@dataclass(eq=False)
class Module:
    """One file: its tree, with the functions around each node."""

    path: Path
    around: dict[ast.AST, tuple[ast.AST, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.path.read_text(encoding="utf-8"))
        self._enclose(self.tree, ())

    def _enclose(self, node: ast.AST, above: tuple[ast.AST, ...]) -> None:
        self.around[node] = above
        for child in ast.iter_child_nodes(node):
            self._enclose(child, (*above, node))

    def functions(self, node: ast.AST) -> list[ast.FunctionDef]:
        """The functions around a node, the innermost first."""
        return [above for above in reversed(self.around[node]) if isinstance(above, ast.FunctionDef)]

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        return {name: value for node in self.tree.body for name, value in _assigned(node)}

    @cached_property
    def imports(self) -> dict[str, tuple[int, list[str], str]]:
        """Names from other modules of the package: how many folders up, in which module, and what they are called there."""
        return {
            alias.asname or alias.name: (node.level, (node.module or "").split("."), alias.name)
            for node in self.around
            if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
        }

    @cached_property
    def defined(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    @cache  # noqa: B019
    def assigned(self, function: ast.FunctionDef) -> list[tuple[ast.stmt, str, ast.expr]]:
        """Assignments of a function."""
        statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        return [(node, name, value) for node in statements for name, value in _assigned(node)]


@dataclass(frozen=True)
class Place:
    """A node, and what a call passes for the parameters of the function around it."""

    module: Module
    node: ast.AST
    values: Values = field(default_factory=dict)

    @property
    def functions(self) -> list[ast.FunctionDef]:
        return self.module.functions(self.node)

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)


Values = Mapping[str, tuple[Place, ast.expr]]


@dataclass
class Source:
    """The modules of a package."""

    package: Path

    @cached_property
    def modules(self) -> dict[tuple[str, ...], Module]:
        files = sorted(self.package.rglob("*.py"))
        return {path.relative_to(self.package).with_suffix("").parts: Module(path) for path in files}

    @cached_property
    def errors(self) -> set[str]:
        """The names of the exception and of its subclasses."""
        found = {"MupscaleError"}
        for module in self.modules.values():
            for node in module.around:
                if isinstance(node, ast.ClassDef) and any(_name(base) in found for base in node.bases):
                    found.add(node.name)
        return found

    @cached_property
    def calls(self) -> dict[str, list[tuple[Module, ast.Call]]]:
        """Every call, by the last name of what is called."""
        found: dict[str, list[tuple[Module, ast.Call]]] = {}
        for module in self.modules.values():
            for node in module.around:
                if isinstance(node, ast.Call):
                    found.setdefault(_name(node.func), []).append((module, node))
        return found

    def sites(self) -> Iterator[Site]:
        """Every refusal, in the order of the files; one that takes its code from its callers once for each of them."""
        for name in ("Fault", *sorted(self.errors)):
            for module, call in self.calls.get(name, ()):
                if name == "Fault" or not (len(call.args) > 1 or _keyword(call, "faults")):
                    yield from self._site(module, call, name == "Fault")

        yield from self._pairs()

    def _pairs(self) -> Iterator[Site]:
        """Codes that are passed on with their words, as (code, message) or (code, message, remedy)."""
        for module in self.modules.values():
            for node in module.around:
                parts = node.elts if isinstance(node, ast.Tuple) else ()
                if isinstance(node, ast.Call) and _name(node.func) not in ("Fault", *self.errors):
                    parts = node.args
                if 2 <= len(parts) <= 3 and isinstance(parts[0], (ast.Constant, ast.Name)):
                    place = Place(module, node)
                    code = self._text(place, parts[0])
                    texts = [self._text(place, part) for part in parts[1:]] if is_code(code) else [""]
                    if " " in texts[0]:
                        at = (str(module.path.relative_to(self.package)), place.line)
                        remedy = texts[1] if len(texts) > 1 else ""
                        yield Site(*at, code, ast.unparse(parts[0]), texts[0], remedy, "")

    def _site(self, module: Module, call: ast.Call, fault: bool) -> Iterator[Site]:
        first = call.args[0] if fault and call.args else None
        given = _keyword(call, "code") or first
        written = "" if given is None else ast.unparse(given)
        at = (str(module.path.relative_to(self.package)), call.lineno)
        found = [
            Site(*at, code, written, *self._texts(Place(module, call, {**values, **chosen}), fault))
            for values in self._callers(module, call, given)
            for code, chosen in self._codes(Place(module, call, values), given)
        ]
        yield from found or [Site(*at, None, written, "", "", "")]

    def _codes(self, place: Place, given: ast.expr | None) -> Iterator[tuple[str, Values]]:
        """The literals that a code may be; a condition gives two, and decides the texts that hang on it too."""
        place, node = self._followed(place, given)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, {}
        elif isinstance(node, ast.IfExp):
            for side in ("body", "orelse"):
                chosen = {f"if {ast.unparse(node.test)}": (place, ast.Constant(side))}
                for code, more in self._codes(place, getattr(node, side)):
                    yield code, {**chosen, **more}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = place.module.defined.get(node.func.id)
            for end in ast.walk(function) if function else ():
                if isinstance(end, ast.Return):
                    yield from self._codes(Place(place.module, end), end.value)

    def _callers(self, module: Module, call: ast.Call, given: ast.expr | None) -> Iterator[Values]:
        """Nothing, or what each caller passes, if the code is a parameter of the function around."""
        owner = next(iter(module.functions(call)), None)
        names = _parameters(owner) if owner else []
        if not (owner and isinstance(given, ast.Name) and given.id in names):
            yield {}
            return
        default = {name: (Place(module, module.tree), value) for name, value in _defaults(owner)}
        for there, caller in self.calls.get(owner.name, ()):
            passed = dict(zip([n for n in names if n not in ("self", "cls")], caller.args, strict=False))
            passed |= {k.arg: k.value for k in caller.keywords if k.arg}
            yield {**default, **{name: (Place(there, caller), value) for name, value in passed.items()}}

    def _texts(self, place: Place, fault: bool) -> tuple[str, str, str]:
        call = place.node
        assert isinstance(call, ast.Call)
        names = ("code", "where", "what", "remedy") if fault else ("claim",)
        parts = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        if not fault:
            message, _, remedy = self._text(place, parts.get("claim")).rpartition("; ")
            return (message, remedy, "") if message else (remedy, "", "")
        remedy = self._text(place, parts["remedy"]) if "remedy" in parts else ""
        return self._text(place, parts.get("what")), remedy, self._claim(place)

    def _claim(self, place: Place) -> str:
        """The first line of the error: of the call around, or of the next one below in the same function."""
        above = place.module.around[place.node]
        if any(isinstance(node, ast.Return) for node in above):
            return ""
        around = [node for node in reversed(above) if isinstance(node, ast.Call)]
        below = [n for f in place.functions[:1] for n in ast.walk(f) if isinstance(n, ast.Call)]
        below = sorted((n for n in below if n.lineno > place.line), key=lambda n: n.lineno)
        for node in (*around, *below):
            if _name(node.func) in ("raise_faults", "raise_few", *self.errors) and len(node.args) > 1:
                text = self._text(Place(place.module, node, place.values), node.args[0])
                return "" if text == "…" else text
        return ""

    def _text(self, place: Place, node: ast.expr | None) -> str:
        """The words of an expression, with {…} for parts that are not known; … where nothing is."""
        place, node = self._followed(place, node)
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._part(place, part) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return "".join(self._part(place, side) for side in (node.left, node.right))
        if isinstance(node, ast.IfExp):
            _, chosen = place.values.get(f"if {ast.unparse(node.test)}", (place, None))
            if isinstance(chosen, ast.Constant):
                return self._text(place, getattr(node, str(chosen.value)))
            sides = [self._text(place, side) for side in (node.body, node.orelse)]
            return "…" if "…" in sides else ", or: ".join(side for side in sides if side)
        return "…"

    def _part(self, place: Place, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            plain = part.conversion == -1 and part.format_spec is None and isinstance(part.value, ast.Name)
            return self._part(place, part.value) if plain else "{…}"
        text = self._text(place, part)
        return "{…}" if text == "…" else text

    def _followed(self, place: Place, node: ast.expr | None) -> tuple[Place, ast.expr | None]:
        """What a name stands for, and where that is written; the name itself where it is not known."""
        while isinstance(node, ast.Name):
            found = self._named(place, node.id)
            if found is None:
                break
            place, node = found
        return place, node

    def _named(self, place: Place, name: str) -> tuple[Place, ast.expr] | None:
        """The last assignment above, what a caller passes, a constant of the module, or one that is imported."""
        module = place.module
        for function in place.functions:
            above = [a for a in module.assigned(function) if a[1] == name and a[0].lineno < place.line]
            if above:
                at, _, value = max(above, key=lambda a: a[0].lineno)
                return Place(module, at, place.values), value
            if name in _parameters(function):
                return place.values.get(name)
        if name in module.constants:
            return Place(module, module.tree), module.constants[name]
        return self._imported(module, name)

    def _imported(self, module: Module, name: str) -> tuple[Place, ast.expr] | None:
        if name not in module.imports:
            return None
        level, parent, original = module.imports[name]
        here = module.path.relative_to(self.package).parts
        found = self.modules.get((*here[: len(here) - level], *parent))
        if found is None or original not in found.constants:
            return None
        return Place(found, found.tree), found.constants[original]


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_code(text: str) -> bool:
    match = CODE.fullmatch(text)
    return match is not None and match[1] in TOPICS


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _parameters(function: ast.FunctionDef) -> list[str]:
    spec = function.args
    return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]


def _defaults(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    spec = function.args
    named = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    yield from zip(reversed(named), reversed(spec.defaults), strict=False)
    yield from ((a.arg, v) for a, v in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if v)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and what a statement assigns to them."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def faults(package: Path = PACKAGE) -> list[tuple[str, str]]:
    """Refusals without a code, or with one of another form or an unknown topic: their place, and the code as written."""
    wrong = []
    for site in Source(package).sites():
        if site.code not in ALONE and not is_code(site.code or ""):
            wrong.append((f"{site.file}:{site.line}", site.expression))
    return list(dict.fromkeys(wrong))

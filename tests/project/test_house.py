"""Laws about the code of the package: functions that can be read at once, and every rule written in one file."""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "mupscale"
TEXTS = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
MOST = 60
"""Lines of code of a function, without its docstring, comments, blank lines and lone brackets."""
LONGER = {
    "sharded/load.py: load", "tensors/triton/kernel.py: make_slice",
}  # fmt: skip
"""Functions above the bound. This list may only become shorter."""


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string and nothing else, as docstrings are."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def lines_of(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no blank lines, comments, docstrings or lone brackets.

    >>> sorted(code_lines('"About."\\n\\nx = [  # a comment\\n    1,\\n]\\n# only a comment\\n'))
    [3, 4]
    """
    silent = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    brackets = ("(", ")", "[", "]", "{", "}", ",")  # where they stand is up to the formatter
    spoken = [t for t in tokens if tokenize.tok_name[t.type] not in silent and t.string not in brackets]
    lines = {line for t in spoken for line in range(t.start[0], t.end[0] + 1)}
    return lines - {line for node in ast.walk(ast.parse(text)) if is_text(node) for line in lines_of(node)}


def longer(name: str, text: str) -> set[str]:
    """The functions of a file with more lines of code than the bound."""
    code = code_lines(text)
    functions = (
        n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return {f"{name}: {f.name}" for f in functions if len(code & lines_of(f)) > MOST}


def test_no_function_is_longer_than_can_be_read_at_once():
    found = {function for name, text in TEXTS.items() for function in longer(name, text)}
    assert found - LONGER == set(), f"more than {MOST} lines of code: is this two functions?"
    assert LONGER - found == set(), "these are short now: remove them above"


def test_a_function_that_is_too_long_is_seen():
    """Control: one line of code above the bound is seen; docstrings, comments and blank lines are not counted."""
    body = "    x = 1\n" * (MOST - 1)
    silent = '    """Says\n    much.\n    """\n\n    # why\n'
    assert longer("a.py", f"def f():\n{silent}{body}") == set()
    assert longer("a.py", f"def f():\n{body}    return x\n") == {"a.py: f"}
    assert longer("a.py", f"class A:\n  async def f():\n{body}    return x\n") == {"a.py: f"}


def relative_differences(tree: ast.AST) -> Iterator[int]:
    """A quotient whose numerator is the size of a difference: |a - b| / …"""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            sizes = [
                c for c in ast.walk(node.left) if isinstance(c, ast.Call) and called(c) in ("abs", "norm")
            ]
            parts = [part for size in sizes for part in ast.walk(size) if isinstance(part, ast.BinOp)]
            if any(isinstance(part.op, ast.Sub) for part in parts):
                yield node.lineno


def scale_or_one(tree: ast.AST) -> Iterator[int]:
    """The weight scale for a parameter and 1 for a buffer: `s if … else 1`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and isinstance(node.body, ast.Attribute) and node.body.attr == "s":
            yield node.lineno


def carry_loops(tree: ast.AST) -> Iterator[int]:
    """A loop that carries the state of one parameter after the other."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.DictComp, ast.ListComp)):
            calls = {called(c) for c in ast.walk(node) if isinstance(c, ast.Call)}
            if calls & {"carry_state", "carried_state"}:
                yield node.lineno


def noise_kinds(tree: ast.AST) -> Iterator[int]:
    """A display that lists two or more kinds of noise, by their names in files or by their classes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Dict, ast.Tuple, ast.List, ast.Set)):
            parts = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
            texts = {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}
            classes = {p.id for p in parts if isinstance(p, ast.Name)}
            listed = texts & {"mup", "signal", "paired"}, classes & {"MupNoise", "SignalNoise", "PairedNoise"}
            if max(map(len, listed)) > 1:
                yield node.lineno


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


HOMES: dict[str, tuple[Callable[[ast.AST], Iterator[int]], str, str]] = {
    "relative difference": (
        relative_differences,
        "tensors/differences.py",
        "worst = (found - wanted).abs().max() / wanted.abs().max()",
    ),
    "s or 1": (scale_or_one, "plans/tensor_plan.py", "scale = entry.change.s if entry.kind == 'parameter' else ONE"),
    "carry loop": (
        carry_loops,
        "optimizers/carry.py",
        "for name in names:\n    state[name] = carry_state(rule, settings, found[name])",
    ),
    "kinds of noise": (noise_kinds, "noise/kinds.py", "kinds = {'mup': MupNoise, 'signal': SignalNoise}"),
}  # fmt: skip
"""A rule: what finds it, the file it lives in, and a line that must be found anywhere else."""
UNRELATED = {"relative difference": ("limits/", "studies/")}
"""Rooms where a quotient of this form is another quantity: convergence of a limit, the gain of one run over another."""


@pytest.mark.parametrize("rule", HOMES)
def test_a_rule_is_written_in_its_home_alone(rule):
    """Control: a line that writes the rule out is found."""
    find, home, planted = HOMES[rule]
    found = {name for name, text in TEXTS.items() if list(find(ast.parse(text)))}
    strangers = {name for name in found - {home} if not name.startswith(UNRELATED.get(rule, ()))}
    assert not strangers, f"{rule} belongs to {home}"
    assert home in TEXTS
    assert list(find(ast.parse(planted))) == [1]


SEARCHES = ("search", "match", "fullmatch", "findall", "startswith", "endswith", "find", "count")
SAYS = ("claim", "what", "remedy", "args", "strerror")
"""Attributes of errors and faults that are written for people."""


def branches_on_words(text: str) -> set[str]:
    """Comparisons and searches of what an error says, where its code or its type could be asked."""
    tree = ast.parse(text)
    errors = {n.name for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)} | {"error", "fault"}

    def says(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr"):
            return any(isinstance(value, ast.Name) and value.id in errors for value in node.args)
        if isinstance(node, ast.Attribute) and node.attr in SAYS:
            return isinstance(node.value, ast.Name) and node.value.id in errors
        return False

    found = set()
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES
        ):
            asked = [node.func.value, *node.args]
        if any(says(part) for value in asked for part in ast.walk(value)):
            found.add(ast.unparse(node))
    return found


OF_TORCH = {
    "models/attempts.py: _ABOUT_DEVICES.search(str(error))",
    "models/build.py: _NO_VALUES.search(str(error))",
    "models/float64.py: 'float64' in str(error)",
    "models/float64.py: _DTYPE_ERROR.search(str(error))",
}
"""Errors of torch and accelerate, which have neither codes nor types of their own."""


def test_no_branch_on_the_words_of_an_error():
    found = {f"{name}: {branch}" for name, text in TEXTS.items() for branch in branches_on_words(text)}
    assert found - OF_TORCH == set(), "ask for the code of the error, or for its type"
    assert OF_TORCH - found == set(), "these are gone: remove them above"


@pytest.mark.parametrize(
    "planted",
    [
        "if 'not there' in str(e): pass",
        "if str(e).startswith('no'): pass",
        "if e.args[0] == 'gone': pass",
        "if fault.what == 'gone': pass",
        "if any(re.search('gone', f'{e.claim}') for _ in '1'): pass",
    ],
)
def test_a_branch_on_the_words_of_an_error_is_seen(planted):
    """Control: in any spelling; a code may be compared."""
    text = "try:\n    pass\nexcept Exception as e:\n    {}"
    assert branches_on_words(text.format(planted))
    assert not branches_on_words(text.format("if e.code == 'file.gone': raise ValueError(str(e))"))

"""No test and no page but the generated one depends on the words of a refusal.

In a copy of the repository, words in the messages of some refusals are spelled backwards: what a `Fault` says was found, or what a
`MupscaleError` claims. Codes, places, values and remedies stay. Then the pages are generated again, and the tests that the
change can touch run there.

    python benchmarks/reword.py [--messages 25] [--seed 0] [--whole] [--control] [--workers 2]

The last line is `messages=N pages=P failed=F`: messages that were changed, generated pages that differ, and tests that fail. The
exit code is 1 when a page other than docs/refusals.md differs or a test fails. With --control one code is changed as well, the tests
that name it run first and up to the first failure, and the exit code is 1 unless one fails and says so. --whole runs every test
instead of those that import a changed file.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import random
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

from harness.program import Outcome, option, run

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/refusals.md"
CONTROL = ("src/mupscale/arguments.py", "argument.not_a_number", "argument.no_number")
WORD = re.compile(r"(?<![\w./={'\"\[(-])[a-z]{4,}(?![\w./=}'\"\])(-])")
"""A plain word: four letters or more, not part of a name, an option, a value or a placeholder."""


def reworded(text: str) -> str:
    """A message with its plain words spelled backwards.

    >>> reworded("length {size} of 'weight', expected lr=0.1")
    "htgnel {size} of 'weight', detcepxe lr=0.1"
    """
    parts = re.split(r"(\{[^{}]*\})", text)
    return "".join(part if part.startswith("{") else WORD.sub(lambda m: m[0][::-1], part) for part in parts)


def messages(source: str) -> Iterator[tuple[int, int]]:
    """The first and last line of every message in a source whose words may change."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        position = {"Fault": 2, "MupscaleError": 0}.get(node.func.id)
        if position is None or len(node.args) <= position:
            continue
        message = node.args[position]
        if isinstance(message, (ast.Constant, ast.JoinedStr)):
            yield message.lineno, message.end_lineno or message.lineno


def reword_(path: Path, lines: tuple[int, int]) -> bool:
    """Change the strings of one message in a file; False where it has no plain word."""
    source = path.read_text(encoding="utf-8")
    rows = source.splitlines(keepends=True)
    before = list(rows)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and lines[0] <= token.start[0] <= lines[1] and " " in token.string:
            row = token.start[0] - 1
            if token.end[0] == token.start[0]:
                rows[row] = rows[row].replace(token.string, reworded(token.string))
    path.write_text("".join(rows), encoding="utf-8")
    return rows != before


def change(copy: Path, count: int, seed: int) -> list[str]:
    """Reword messages that a seed chooses, and return where they are."""
    found = [
        (path, lines)
        for path in sorted((copy / "src" / "mupscale").rglob("*.py"))
        for lines in messages(path.read_text(encoding="utf-8"))
    ]
    random.Random(seed).shuffle(found)
    changed: list[str] = []
    while found and len(changed) < count:
        path, lines = found.pop()
        if reword_(path, lines):
            changed.append(f"{path.relative_to(copy)}:{lines[0]}")
    return changed


def measure(chosen: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "mupscale"
        subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
        environment = {
            "MUPSCALE_DATA": str(ROOT.parent / "shared/data"),
            **os.environ,
            "PYTHONPATH": f"{copy / 'src'}:{copy}",
        }

        def call(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                words,
                cwd=copy,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )

        changed = change(copy, chosen.messages, chosen.seed)
        if chosen.control:
            file, code, other = CONTROL
            (copy / file).write_text((copy / file).read_text().replace(code, other))
        print("\n".join(changed))
        call("ruff", "format", "--quiet", "src")
        call(sys.executable, "docs/generate.py")
        pages = call("git", "diff", "--name-only", "--", "*.md").stdout.split()
        line = call(sys.executable, ".ci/touched.py", "HEAD").stdout.splitlines()[0]
        files = [] if chosen.whole else [word for word in line.split() if word.startswith(("tests", "src"))]
        how = ["-n", str(chosen.workers), "--dist", "loadfile"]
        if chosen.control:
            naming = set(call("git", "grep", "-l", CONTROL[1], "--", "tests").stdout.split())
            files, how = sorted(files, key=lambda file: file not in naming), ["-x"]
        tests = call(sys.executable, "-m", "pytest", *how, *files)
        print(tests.stdout[-6000:])
        failed = [line for line in tests.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if tests.returncode not in (0, 1) or (tests.returncode == 1 and not failed):
            return Outcome("", [f"pytest ended with {tests.returncode}: {tests.stderr[-2000:]}"])
    last = f"messages={len(changed)} pages={len(pages)} failed={len(failed)}"
    if chosen.control:
        noticed = failed and CONTROL[2] in tests.stdout
        return Outcome(last, [] if noticed else ["a changed code is not noticed by any test"])
    wrong = [f"{page} differs" for page in pages if page != PAGE]
    return Outcome(last, [*wrong, *failed])


if __name__ == "__main__":
    sys.exit(
        run(
            measure,
            option("--messages", type=int, default=25, help="how many to change (default: 25)"),
            option("--seed", type=int, default=0, help="which ones"),
            option("--whole", action="store_true", help="run every test"),
            option("--control", action="store_true", help="also change a code, which must be noticed"),
            option("--workers", type=int, default=2, help="tests that run side by side (default: 2)"),
            doc=__doc__,
        )
    )

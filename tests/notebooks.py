"""Notebooks without Jupyter: run the cells in order as one script, and compare or store what they print.

A cell whose lines begin with `!` is a shell command. What a cell prints must be what is stored, to the last digit where the
cell has the tag "deterministic", and digits aside elsewhere. `python -m tests.notebooks` runs all and stores.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness.pages import not_printed
from tests.blocks import run_command

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
DETERMINISTIC = "deterministic"


def printed_by(source: str, space: dict[str, object]) -> str:
    """What one cell prints.

    >>> printed_by("x = 2\\nprint(x)", {})
    '2\\n'
    """
    if source.startswith("!"):
        said = "".join(run_command(line.removeprefix("!")) for line in source.splitlines())
        return said.replace(f"{Path.cwd()}{os.sep}", "")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), space)
    return printed.getvalue()


def run(notebook: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every cell of code with what it prints, in the current folder."""
    space: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [(cell, printed_by("".join(cell["source"]), space)) for cell in cells]


def stored(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", [])) for output in cell["outputs"])


def fault(cell: dict[str, Any], printed: str) -> str:
    """What differs between what a cell prints and what is stored; nothing where they agree.

    >>> cell = {"metadata": {"tags": ["deterministic"]}, "outputs": [{"text": ["loss 1\\n"]}]}
    >>> fault(cell, "loss 1\\n"), fault(cell, "loss 2\\n")
    ('', 'stored: loss 1 printed: loss 2')
    """
    shown = stored(cell)
    if DETERMINISTIC in cell["metadata"].get("tags", []):
        same = shown == printed
    else:
        same = not not_printed(shown, printed) and not not_printed(printed, shown)
    return "" if same else f"stored: {shown.strip()} printed: {printed.strip()}"


def main() -> int:
    torch.set_num_threads(1)
    here = Path.cwd()
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                found = run(notebook)
            finally:
                os.chdir(here)
        for number, (cell, printed) in enumerate(found, 1):
            text = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [text] if printed else []}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(found)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())

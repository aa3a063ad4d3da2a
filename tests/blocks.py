"""Run the blocks of a Markdown page, in one folder and one namespace, and compare what they print with what it shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.pages import OUTPUT, Block, blocks_of, commands_of, not_printed
from mupscale.cli.main import main


def run_command(command: str) -> str:
    """What a command prints; `mupscale` is called in this process, which spares importing torch for each."""
    if command.startswith("mupscale ") and not re.search(r"[|;&<>`]", command):
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            try:
                status = main(shlex.split(os.path.expandvars(command))[1:])
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 2
        printed, trouble = said.getvalue(), complained.getvalue()
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True, text=True, check=False, env={**os.environ, "PATH": path},
        )  # fmt: skip
        status, printed, trouble = done.returncode, done.stdout, done.stderr
    assert status == 0, f"{command}: exit status {status}\n{printed[-2000:]}{trouble[-2000:]}"
    return printed


def run_page(
    page: str, name: str, space: dict[str, object], left_out: Callable[[Block], bool] = lambda block: False
) -> None:
    """Run a page's blocks in the current folder and compare what they print with what it shows.

    What a block that is left out would print is not compared.
    """
    printed: str | None = ""
    for block in blocks_of(page):
        if block.runs and left_out(block):
            printed = None
        elif block.runs and block.language == "bash":
            printed = "".join(map(run_command, commands_of(block.text)))
        elif block.runs:
            said = io.StringIO()
            code = compile("\n" * block.line + block.text, name, "exec")
            with contextlib.redirect_stdout(said):
                exec(code, space)
            printed = said.getvalue()
        elif block.language == OUTPUT and not block.reason and printed is not None:
            missing = not_printed(block.text, printed)
            assert not missing, f"{name}, line {block.line}: not printed: {missing}\nbut this is:\n{printed}"

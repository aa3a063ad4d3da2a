"""A new user gets from nothing to a recipe and a report within ten minutes, by typing what the page says.

Builds the wheel, makes an empty environment with torch from the registry in it, and follows docs/tuning.md: its first
block, which writes the proxy, and the study that it gives to try. Both are read from the page, so the page is what is
tested. The wheel stands for the name in `pip install`, nothing else is changed. The control is the same command before the extras are installed: it must fail
and say in one line what to install.

    python benchmarks/new_user.py

Needs a package registry that pip reaches; without one the exit code is 2. The last line is
`seconds=S torch=S install=S tune=S loss=L without_noise=L`; the exit code is 1 when anything is missing or the whole takes
more than 600 seconds on two cores.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.fresh_install import ROOT, Shell, installed, wheel_in, with_torch

PAGE, FOLDER = ROOT / "docs" / "tuning.md", "--folder try"
SECONDS = 600.0
READ = "import mupscale as mu; r = mu.Recipe.read({!r}); print(r.lr, r.loss, r.control)"


def lines_of(page: str) -> tuple[list[str], list[str]]:
    """The lines that install, and those of the study that is given to try, in the page's order.

    >>> installs, rest = lines_of('    pip install "mupscale[tune]"\\n`mupscale tune proxy.py -k 2 --folder try`, then')
    >>> installs, rest
    (['pip install "mupscale[tune]"'], ['mupscale tune proxy.py -k 2 --folder try'])
    """
    start = r"(?:^ {4}|`)"
    installs = re.findall(rf"{start}(pip install [^`\n]*mupscale[^`\n]*)", page, re.M)
    rest = re.findall(rf"{start}(mupscale [a-z]+ [^`\n]*{re.escape(FOLDER)}[^`\n]*)", page, re.M)
    return list(dict.fromkeys(installs)), list(dict.fromkeys(rest))


def walk(shell: Shell, wheel: Path) -> tuple[list[str], str]:
    """Everything that the user does; what failed, and what the recipe says."""
    page = PAGE.read_text(encoding="utf-8")
    installs, lines = lines_of(page)
    failed = []
    if not installs or not lines:
        return [f"{PAGE.name} does not say how to install, or has no line with {FOLDER}"], ""
    block = re.search(r"```python\n(.*?)```", page, re.S)
    if block is None or shell.run("proxy", ["python", "-c", block[1]]).returncode:
        return [f"the first block of {PAGE.name} does not write the proxy"], ""
    if shell.run("install", ["pip", "install", "--quiet", wheel]).returncode:
        return ["the wheel could not be installed"], ""
    bare = shell.run("control", shlex.split(lines[0]))
    if bare.returncode == 0 or "pip install" not in bare.stderr or "Traceback" in bare.stderr:
        failed.append("without the extras the command does not say in one line what to install")
    for line in installs:
        if shell.run("install", installed(line, wheel)).returncode:
            return [*failed, f"{line}: failed"], ""
    for line in lines:
        if shell.run("tune", shlex.split(line)).returncode:
            failed.append(f"{line}: failed")
    recipes = sorted(shell.room.glob("*/recipe.json"))
    if len(recipes) != 1:
        return [*failed, f"{len(recipes)} recipes, expected one"], ""
    page_of = recipes[0].parent / "report" / "index.html"
    text = page_of.read_text(encoding="utf-8") if page_of.is_file() else ""
    if "</html>" not in text.lower():
        failed.append(f"there is no report in {page_of.relative_to(shell.room)}")
    read = shell.run("tune", ["python", "-c", READ.format(str(recipes[0]))])
    return failed, read.stdout.strip() if read.returncode == 0 else ""


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        shell = Shell(Path(name))
        wheel = wheel_in(shell.room / "dist")
        began = time.monotonic()
        if not with_torch(shell):
            return 2
        failed, told = walk(shell, wheel)
        seconds = time.monotonic() - began
    numbers = list(map(float, told.split())) if told else []
    if len(numbers) != 3:
        failed.append("there is no recipe with a learning rate, a loss and the loss without noise")
        numbers = [float("nan")] * 3
    if seconds > SECONDS:
        failed.append(f"{seconds:.0f} seconds, allowed {SECONDS:.0f}")
    for failure in failed:
        print(f"FAILED: {failure}")
    spent = " ".join(f"{what}={shell.seconds.get(what, 0.0):.0f}" for what in ("torch", "install", "tune"))
    print(f"\nseconds={seconds:.0f} {spent} loss={numbers[1]:.4f} without_noise={numbers[2]:.4f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

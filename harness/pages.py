"""The blocks of a Markdown page: which are run, which say why not, and what they must print.

`python` and `bash` blocks run in the order of the page. A `text` block is what the block before it prints. Whatever is not
run has `<!-- not run: the reason -->` right above it. Knows nothing about any page, and imports neither torch nor the package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import nan
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RUN = ("python", "bash")
OUTPUT = "text"
_REASON = re.compile(r"<!-- not run: (\S.*) -->")
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """One block: where it begins, what it is, and why it is not run, if it is not."""

    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def runs(self) -> bool:
        return self.language in RUN and not self.reason


def blocks_of(page: str) -> list[Block]:
    """Fenced and indented blocks, each with the reason above it.

    >>> page = "<!-- not run: a cluster -->\\n```bash\\nsrun it\\n```\\n\\n```python\\nx = 1\\n```\\n"
    >>> [(block.language, block.reason, block.runs) for block in blocks_of(page)]
    [('bash', 'a cluster', False), ('python', '', True)]
    """
    found: list[Block] = []
    lines = page.splitlines()
    i, above = 0, ""
    while i < len(lines):
        said = _REASON.fullmatch(above.strip())
        if lines[i].startswith("```"):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith("```"))
            language, text = lines[i].removeprefix("```"), "\n".join(lines[i + 1 : end]) + "\n"
            found.append(Block(i + 1, language, text, said[1] if said else ""))
            i, above = end, ""
        elif lines[i].startswith("    ") and (i == 0 or not lines[i - 1].strip()):
            found.append(Block(i + 1, "", lines[i]))
        above = lines[i] or above
        i += 1
    return found


def faults_of(page: str) -> list[str]:
    """What is wrong with a page before anything is run."""
    faults, before = [], None
    for block in blocks_of(page):
        if not block.reason:
            if block.language not in (*RUN, OUTPUT):
                faults.append(
                    f"line {block.line}: a {block.language or 'nameless'} block that says no reason"
                )
            elif block.language == OUTPUT and not (before and before.runs):
                faults.append(f"line {block.line}: the output of a block that is not run")
        before = block
    return faults


def commands_of(text: str) -> list[str]:
    """The command lines of a shell block, continued lines joined and comments left out.

    >>> commands_of("# both\\nmupscale plan ./base \\\\\\n    -k 2   # all\\nls\\n")
    ['mupscale plan ./base -k 2', 'ls']
    """
    lines = text.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    return [" ".join(line.split()) for line in bare if line.strip()]


def not_printed(shown: str, printed: str) -> str:
    """The first piece of a shown output that was not printed, digits and spaces aside; "" when all was.

    A line with … alone stands for any number of lines.

    >>> shown = "step 0  loss 1.5e-3\\n…\\nexact"
    >>> not_printed(shown, "step 0 loss 2.25\\nstep 1 loss 2\\nexact\\n")
    ''
    >>> not_printed(shown, "step 0 loss 2.25\\nbroken\\n")
    'exact'
    """
    rest = _masked(printed)
    for piece in re.split(r"^…\n", shown, flags=re.M):
        wanted = _masked(piece)
        starts = range(len(rest) - len(wanted) + 1)
        start = next((i for i in starts if rest[i : i + len(wanted)] == wanted), None)
        if start is None:
            return piece
        rest = rest[start + len(wanted) :]
    return ""


def _masked(text: str) -> list[str]:
    """Lines that are not empty, with # for every number and one space for many."""
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines() if line.strip()]


def section_of(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above; "" when there is no such heading.

    >>> section_of("# A\\n\\n## B\\n```bash\\n# all\\n```\\n### C\\ntwo\\n## D\\nthree\\n", "B")
    '```bash\\n# all\\n```\\n### C\\ntwo\\n'
    """
    kept: list[str] = []
    level, inside = 0, False
    for line in page.splitlines(keepends=True):
        inside ^= line.startswith("```")
        found = None if inside else re.match(r"(#+) (.*)", line)
        if found and level and len(found[1]) <= level:
            break
        if level:
            kept.append(line)
        elif found and found[2] == heading:
            level = len(found[1])
    return "".join(kept)


def typed(page: str, heading: str = "") -> list[Block]:
    """The blocks of a page, or of one part of it; a part that is gone, or has none, is a fault."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = blocks_of(section_of(text, heading) if heading else text)
    if not blocks:
        raise LookupError(f"{page} has nothing to type under '{heading}'")
    return blocks


def python_of(blocks: list[Block]) -> str:
    return "".join(block.text for block in blocks if block.language == "python" and block.runs)


def shell_of(blocks: list[Block]) -> list[str]:
    return [line for block in blocks if block.language == "bash" for line in commands_of(block.text)]


def changed(text: str, pattern: str, new: str) -> str:
    """A text with one change; one that cannot be made is a fault of the page.

    >>> changed("GELU()", "GELU", "ReLU")
    'ReLU()'
    """
    found, count = re.subn(pattern, new, text)
    if count != 1:
        raise LookupError(f"{count} places to change by {pattern!r}, expected one")
    return found


def not_shown(blocks: list[Block], printed: str) -> str:
    """The first piece of what a page shows that was not printed, digits aside; "" when all was."""
    shown = [block.text for block in blocks if block.language == OUTPUT and not block.reason]
    return next((missing for text in shown if (missing := not_printed(text, printed))), "")


def apart(a: list[float], b: list[float]) -> float:
    """The largest relative difference; not a number where one is shorter or empty.

    >>> apart([2.0, 4.0], [2.0, 3.0]), apart([1.0], [])
    (0.25, nan)
    """
    return (
        max((abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)), default=nan)
        if len(a) == len(b)
        else nan
    )

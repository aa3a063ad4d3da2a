"""The page of refusals: one line for each code, by topic, which is the part of a code before its dot."""

import re
from pathlib import Path

from docs.refusal_sites import PACKAGE, TOPICS, Site, Source

HEAD = """# Refusals

What cannot be done exactly, or cannot be done at all, is refused: a `mu.MupscaleError` is raised before anything is changed. It
says everything that is wrong at once. Each fault has a code, the place where it is, what was found, and what to write instead.

A code stays when the words of its message change, so programs compare codes:

```python
import mupscale as mu

try:
    mu.rules.rule_for("no.such.Optimizer")
except mu.MupscaleError as error:
    print(error.codes)
```

```text
('optimizer.unknown_class',)
```

Programs that only ask what happened catch one of four types, which the codes decide: `mu.errors.NotExact`,
`mu.errors.Undecided` (add a loss or a declaration), `mu.errors.WrongArgument` (a `ValueError` too) and `mu.errors.DamagedFile`.
Refusals of other kinds, such as a full disk, are a plain `mu.MupscaleError`.

`error.faults` has the faults, each with `code`, `where`, `what` and `remedy`. `error.code` is the first code. The command line
prints codes in brackets, and `[usage]` where a command cannot be parsed.

This page is printed from the source by `python docs/generate.py`, one line for each code. The part before the dot is the topic.
{…} is a value that is known only when a program runs. The last column has the first line of the error, where the message is one
of its faults and the line is known.
"""


def refusals(package: Path = PACKAGE) -> str:
    """The page."""
    known: dict[str, list[Site]] = {}
    for site in Source(package).sites():
        if site.code is not None:
            known.setdefault(site.code, []).append(site)
    topics: dict[str, list[str]] = {}
    for code in sorted(known):
        topics.setdefault(code.partition(".")[0] if "." in code else "", []).append(code)
    lines = [HEAD]
    for topic in (*sorted(topics.keys() - {""}), ""):
        head, told = (topic, TOPICS.get(topic, "")) if topic else ("Without a topic", "")
        if topic in topics:
            lines += [f"## {head}", "", *([told, ""] if told else [])]
            lines += ["| code | message | remedy | first line |", "|---|---|---|---|"]
            lines += [_row(code, known[code]) for code in topics[topic]]
            lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _row(code: str, sites: list[Site]) -> str:
    columns = [[getattr(site, name) for site in sites] for name in ("message", "remedy", "claim")]
    return f"| `{code}` | {' | '.join(map(_cell, columns))} |".replace("  ", " ")


def _cell(texts: list[str]) -> str:
    """Different texts below each other, in signs that Markdown shows as they are."""
    known = [text for text in dict.fromkeys(texts) if text]
    plain = [text for text in known if text.strip("…{} ")] or known[:1]
    shown = [re.sub(r"([\\`*_{\[|])", r"\\\1", " ".join(text.split())).replace("<", "&lt;") for text in plain]
    return "<br>".join(shown)

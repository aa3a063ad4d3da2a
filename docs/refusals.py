"""The page of refusals: one line for each code, by topic, which is the part of a code before its dot."""

import re
from pathlib import Path

from docs.refusal_sites import PACKAGE, TOPICS, Site, Source


def refusals(package: Path = PACKAGE) -> str:
    """The tables of the page."""
    known: dict[str, list[Site]] = {}
    for site in Source(package).sites():
        if site.code is not None:
            known.setdefault(site.code, []).append(site)
    topics: dict[str, list[str]] = {}
    for code in sorted(known):
        topics.setdefault(code.partition(".")[0] if "." in code else "", []).append(code)
    lines = []
    for topic in (*sorted(topics.keys() - {""}), ""):
        head, told = (topic, TOPICS.get(topic, "")) if topic else ("Without a topic", "")
        if topic in topics:
            lines += [f"## {head}", "", *([told, ""] if told else [])]
            lines += ["| code | message | remedy | first line |", "|---|---|---|---|"]
            lines += [_row(code, known[code]) for code in topics[topic]]
            lines.append("")
    return "\n".join(lines[:-1])


def _row(code: str, sites: list[Site]) -> str:
    columns = [[getattr(site, name) for site in sites] for name in ("message", "remedy", "claim")]
    return f"| `{code}` | {' | '.join(map(_cell, columns))} |".replace("  ", " ")


def _cell(texts: list[str]) -> str:
    """Different texts below each other, in signs that Markdown shows as they are."""
    known = [text for text in dict.fromkeys(texts) if text]
    plain = [text for text in known if text.strip("…{} ")] or known[:1]
    shown = [re.sub(r"([\\`*_{\[|])", r"\\\1", " ".join(text.split())).replace("<", "&lt;") for text in plain]
    return "<br>".join(shown)

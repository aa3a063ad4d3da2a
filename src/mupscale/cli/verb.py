"""A verb as every verb is shown: one line in the list, a description, examples that can be typed.

Knows argparse. Knows nothing of what verbs do.
"""

from __future__ import annotations

import argparse
from textwrap import fill
from typing import Any

_WIDTH = 88


def add_verb(verbs: Any, name: str, text: str, more: str = "", *, examples: tuple[str, ...]) -> Any:
    """The parser of a verb: `text` stands in the list of verbs, and with `more` at the top of its own help.

    >>> verbs = argparse.ArgumentParser(prog="mupscale").add_subparsers()
    >>> verb = add_verb(verbs, "plan", "show what would grow", "Nothing is written.", examples=("./base -k 2",))
    >>> print(verb.description, verb.epilog, sep=chr(10))
    Show what would grow. Nothing is written.
    example:
      mupscale plan ./base -k 2
    """
    lines = "\n".join(f"  mupscale {name} {example}".rstrip() for example in examples)
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=fill(f"{text[0].upper()}{text[1:]}. {more}".strip(), _WIDTH),
        epilog=f"{'examples' if len(examples) > 1 else 'example'}:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return verb

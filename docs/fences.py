"""Show doctests of docstrings as code: a griffe extension, named in mkdocs.yml.

Markdown takes `>>>` for three quotations. Knows nothing about any module.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)


def fenced(text: str) -> str:
    """Every example, its output included, in a fence of its own.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Fences(griffe.Extension):
    """Fences the examples of every docstring that griffe collects."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

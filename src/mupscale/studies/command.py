"""The command that began a study, kept in its folder: what to type next repeats it with other options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MupscaleError
from ..files.strict import parse_json, read_regular
from .whole import write_whole

_NAME = "command.json"


@dataclass(frozen=True)
class Command:
    """What was given to `mupscale tune`, apart from the seed and the folder.

    >>> command = Command("proxy.py", {"--width": "8", "-k": "2", "--no-halving": None})
    >>> command.line({"--width": "16", "--seed": "1"})
    'mupscale tune proxy.py --width 16 -k 2 --no-halving --seed 1'
    >>> command.applied(Path("tuning"), 2)
    "mu.upscale(run, make_wide, recipe=mu.studies.Recipe.read('tuning/recipe.json'))"
    """

    proxy: str
    options: Mapping[str, str | None]
    """Each option with its value; None for one that has none."""

    def line(self, changes: Mapping[str, str | None]) -> str:
        """The command with these options instead of, or added to, its own."""
        words = [word for pair in {**self.options, **changes}.items() for word in pair if word is not None]
        return shlex.join(["mupscale", "tune", self.proxy, *words])

    def applied(self, folder: Path, k: int) -> str:
        """How the recipe in this folder is applied; directories are the proxies that are given a text."""
        path = str(folder / "recipe.json")
        if "--data" not in self.options:
            return f"mu.upscale(run, make_wide, recipe=mu.studies.Recipe.read({path!r}))"
        out = f"{self.proxy.rstrip('/')}-x{k}"
        return shlex.join(["mupscale", "upscale", self.proxy, out, "-k", str(k), "--recipe", path])

    def save(self, folder: Path) -> None:
        """Keep it in the folder of its study."""
        write_whole(folder / _NAME, json.dumps({"proxy": self.proxy, "options": dict(self.options)}).encode())


def read_command(folder: Path, study: str) -> Command | None:
    """The command of a study; None for one that was begun in Python, or if the folder keeps that of another study."""
    try:
        found = parse_json(read_regular(folder / _NAME), _NAME)
        options = {
            str(name): None if value is None else str(value)
            for name, value in found["options"].items()
            if name not in ("--sampler", "--generations")  # of 0.2.0
        }
        return Command(str(found["proxy"]), options) if options.get("--study", "mupscale") == study else None
    except (MupscaleError, OSError, KeyError, TypeError, AttributeError):
        return None

"""Results that are kept one by one: a file of JSON lines, read at the start and appended to after each run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from mupscale import MupscaleError

RESULTS = Path(__file__).parent / "results"


class Store:
    """The results in one file. `of` gives the kept result of a key, or makes and keeps it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     first = Store(Path(folder) / "runs.jsonl").of({"lr": 0.1}, lambda: {"loss": 2.0})
    ...     again = Store(Path(folder) / "runs.jsonl").of({"lr": 0.1}, lambda: {"loss": 3.0})
    >>> first["loss"], again["loss"]
    (2.0, 2.0)
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any] | None = None, earlier: Sequence[Path] = ()
    ) -> None:
        """`about` is what all results share and keys leave out; a file that was begun with another is refused.

        Results in `earlier` files count as kept; new ones go to `path`.
        """
        self.path = path
        self._kept: dict[str, dict[str, Any]] = {}
        for each in earlier:
            self._kept |= Store(each)._kept
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self._head = (
            "" if about is None or lines else json.dumps({"about": dict(about)}, sort_keys=True) + "\n"
        )
        for line in lines:
            found = json.loads(line)
            if "about" in found:
                if about is not None and found["about"] != json.loads(json.dumps(dict(about))):
                    raise MupscaleError(
                        f"{path} holds results of {found['about']}, not of {dict(about)}: move it away to start anew"
                    )
            else:
                self._kept[_name(found["key"])] = found["result"]

    def known(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._kept.get(_name(key))

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Every key with its result."""
        return ((json.loads(name), result) for name, result in self._kept.items())

    def of(self, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        name = _name(key)
        if name not in self._kept:
            started = perf_counter()
            made = make()
            result = {**made, "seconds": round(perf_counter() - started, 1)}
            self._append(self._head + json.dumps({"key": dict(key), "result": result}, sort_keys=True) + "\n")
            self._head, self._kept[name] = "", result
        return self._kept[name]

    @property
    def seconds(self) -> float:
        """How long everything that is kept took, on one core."""
        return float(sum(result["seconds"] for result in self._kept.values()))

    def _append(self, line: str) -> None:
        """One write of whole lines, so that several processes may share the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)

"""Which code a stored measurement belongs to: a key of the source of the rooms that it depends on.

Every line of docs/benchmarks.json and every entry of the files in `FILES` is stored with the key that the code had when it
was measured. When the code of a room changes in what it does, the keys of what depends on that room change, and pages that
cite it say that it was measured on an earlier version. Comments, docstrings and formatting change no key.

    python -m harness.evidence

lists what has to be measured again before a release; the exit code is 1 when there is anything. It needs no package but
Python's own. The results in reproduce/results are records of experiments, which name their own settings, and have no key.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = Path("docs") / "benchmarks.json"
EARLIER = "(measured on an earlier version)"
"""What a page says next to a figure whose key is not that of the code."""

GROWTH = (
    "rules", "tensors", "models", "plans", "optimizers", "runs", "noise", "proofs", "planning", "training",
)  # fmt: skip
"""Growing a model that is in memory."""
FAMILIES = (*GROWTH, "families")
"""The same for a class of transformers."""
JOBS = ("rules", "tensors", "storage", "files", "jobs", "formats", "checkpoints")
"""Writing a wide checkpoint from a plan."""
CHECKPOINTS = tuple(dict.fromkeys((*FAMILIES, *JOBS)))
"""Growing a directory of Hugging Face."""
TRAINERS = (*CHECKPOINTS, "trainers")
SHARDED = (*CHECKPOINTS, "sharded")
EVERYTHING = ("src/mupscale",)

ROOMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("coordinates", "covertype", "exactness", "noise_damage", "noise_sizes", "proof_cost"), GROWTH),
    **dict.fromkeys(("auto_noise", "widen_memory", "zero_noise"), GROWTH),
    "growth_units": GROWTH,
    "zoo": (*GROWTH, "harness/zoo"),
    "loops": (*GROWTH, "harness/loops"),
    **dict.fromkeys(("growth", "growth_words", "growth_multiplied", "growth_more", "public_models", "families_wide"), FAMILIES),
    "families": (*FAMILIES, "harness/family_configs.py"),
    **dict.fromkeys(("families_popular", "families_popular_units"), FAMILIES),
    **dict.fromkeys(("faults", "kill_and_resume", "norms", "scale_70b", "storage", "stream"), JOBS),
    "hostile": (*JOBS, "families", "sameness", "cli"),
    "same": ("files", "formats", "sharded/source.py", "sameness"),
    **dict.fromkeys(("growth_path", "real_models", "same_bits"), CHECKPOINTS),
    **dict.fromkeys(("engines_run", "megatron_fsdp", "megatron_run", "optimizers"), TRAINERS),
    "sharded": SHARDED,
    "metadata": ("files", "sharded"),
    "advise": ("budgets",),
    "verdict_chance": ("studies/report",),
    "tuning_cost": (*GROWTH, "studies", "budgets"),
    **dict.fromkeys(("checkpoint_owner", "devices", "first_minutes", "import_time", "reword", "start_up"), EVERYTHING),
}  # fmt: skip
"""A row of docs/benchmarks.json, or what a file of `FILES` holds -> the rooms that its figures depend on.

A name is a room of the package, or a path from the root of the repository.
"""
FILES = {
    "benchmarks/zoo.jsonl": "zoo",
    "benchmarks/families_popular.jsonl": "families_popular",
    "benchmarks/families_popular_units.jsonl": "families_popular",
    "benchmarks/families_wide.json": "families_wide",
    "benchmarks/public_models_found.json": "public_models",
    "docs/optimizers.json": "optimizers",
}
"""Stored results with one entry per model, type or optimizer, each of which has a key."""


def code_key(rooms: Iterable[str], root: Path = ROOT) -> str:
    """A hash of what the code of some rooms does, and of the data next to it.

    >>> code_key(["rules"]) == code_key(["rules"]) != code_key(["tensors"])
    True
    """
    digest = hashlib.sha256()
    for name in sorted(set(rooms)):
        room = root / "src" / "mupscale" / name
        room = room if room.exists() else root / name
        files = [room] if room.is_file() else sorted(p for p in room.rglob("*") if p.is_file())
        files = [path for path in files if "__pycache__" not in path.parts]
        if not files:
            raise FileNotFoundError(f"{name} is neither a room of the package nor a path of the repository")
        for path in files:
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(_content(path, path.stat().st_mtime_ns))
    return digest.hexdigest()[:12]


@cache
def _content(path: Path, changed: int) -> bytes:
    """A hash of one file: of the syntax tree of Python, of the bytes of anything else."""
    data = path.read_bytes()
    text = repr(_meaning(ast.parse(data))).encode() if path.suffix == ".py" else data
    return hashlib.sha256(text).digest()


def _meaning(value: Any) -> Any:
    """A syntax tree as nested tuples, without strings that stand alone and without empty fields.

    Empty fields are left out because versions of Python differ in them.
    """
    if isinstance(value, list):
        return tuple(_meaning(item) for item in value if not _is_docstring(item))
    if not isinstance(value, ast.AST):
        return value
    fields = (
        (name, _meaning(part)) for name, part in ast.iter_fields(value) if part is not None and part != []
    )
    return type(value).__name__, *fields


def _is_docstring(node: Any) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def key_of(name: str, root: Path = ROOT) -> str:
    """The key that a row, or an entry of a stored file, has when it is measured now."""
    return code_key(ROOMS[name], root)


def is_of(key: str, entry: Mapping[str, Any]) -> bool:
    """Whether an entry was measured on the code of this key.

    The key of an entry may continue behind a dash, with a hash of what was measured.

    >>> is_of("0a1b", {"key": "0a1b"}), is_of("0a1b", {"key": "0a1b-77"}), is_of("0a1b", {"exact": True})
    (True, True, False)
    """
    return str(entry.get("key", "")).partition("-")[0] == key


def entries(file: str, root: Path = ROOT) -> list[dict[str, Any]]:
    """The entries of a stored file: lines of a .jsonl, values or items of a .json."""
    text = (root / file).read_text(encoding="utf-8")
    if file.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    found = json.loads(text)
    return list(found.values()) if isinstance(found, dict) else found


def mark(file: str) -> str:
    """What a page writes behind figures of a stored file: nothing if all of them are of this code."""
    key = key_of(FILES[file])
    return "" if all(is_of(key, entry) for entry in entries(file)) else f" {EARLIER}"


def unmarked(page: str) -> str:
    """A page without what it says about earlier versions, which changes with the code and not with the page.

    >>> unmarked(f"| `exact=1`<br>{EARLIER} | 3 types {EARLIER}")
    '| `exact=1` | 3 types'
    """
    return re.sub(rf"(?:<br>| ){re.escape(EARLIER)}", "", page)


def stale(root: Path = ROOT) -> Iterator[str]:
    """What was not measured on this code, one line each."""
    for name, row in json.loads((root / ROWS).read_text(encoding="utf-8")).items():
        if "line" in row and not is_of(key_of(name, root), row):
            yield f"{name}: python docs/generate.py --benchmarks {name}"
    for file, name in FILES.items():
        found, key = entries(file, root), key_of(name, root)
        old = sum(not is_of(key, entry) for entry in found)
        if old:
            yield f"{file}: {old} of {len(found)} entries"


if __name__ == "__main__":
    lines = list(stale())
    print("\n".join(lines) or "everything was measured on this code")
    sys.exit(bool(lines))

"""Stored figures are keyed by the code they belong to: what changes a key, and what is found to be out of date."""

import json
import shutil
from pathlib import Path

import pytest

from harness import evidence
from harness.evidence import FILES, ROOMS, ROOT, ROWS, code_key, key_of, stale

SOURCE = '''"""About."""

LIMIT = 3
"""What the limit is for."""


def twice(x):
    """Twice x."""
    return 2 * x
'''


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A package of two rooms, one of them with a table next to its code."""
    for name in ("plans", "rules"):
        folder = tmp_path / "src" / "mupscale" / name
        folder.mkdir(parents=True)
        (folder / "code.py").write_text(SOURCE)
    (tmp_path / "src" / "mupscale" / "rules" / "table.json").write_text("[1]")
    return tmp_path


def changed(root: Path, file: str, text: str) -> bool:
    """Whether a file with this text gives `rules` another key."""
    before = code_key(["rules"], root)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text)
    return code_key(["rules"], root) != before


RULES = "src/mupscale/rules"


@pytest.mark.parametrize(
    "text",
    [
        f"# a comment\n{SOURCE}",
        SOURCE.replace("About.", "About something else."),
        SOURCE.replace('    """Twice x."""\n', ""),
        SOURCE.replace("What the limit is for", "Why there is a limit"),
        SOURCE.replace("    return 2 * x", "\n    return (\n        2 * x\n    )  # doubled"),
    ],
)
def test_comments_docstrings_and_formatting_keep_the_key(room, text):
    assert text != SOURCE
    assert not changed(room, f"{RULES}/code.py", text)


def test_what_code_does_changes_the_key(room):
    """A constant, an operator, a string that is used, a table, a file that is added, and a file that is renamed."""
    assert changed(room, f"{RULES}/code.py", SOURCE.replace("LIMIT = 3", "LIMIT = 4"))
    assert changed(room, f"{RULES}/code.py", SOURCE.replace("2 * x", "2 + x"))
    assert changed(room, f"{RULES}/code.py", SOURCE + 'NAME = "text"\n')
    assert changed(room, f"{RULES}/table.json", "[2]")
    assert changed(room, f"{RULES}/new.py", "")
    before = code_key(["rules"], room)
    (room / RULES / "new.py").rename(room / RULES / "newer.py")
    assert code_key(["rules"], room) != before


def test_another_room_keeps_the_key(room):
    other = SOURCE.replace("LIMIT = 3", "LIMIT = 4")
    before = code_key(["plans"], room)
    assert not changed(room, "src/mupscale/plans/plan.py", other)
    assert not changed(room, f"{RULES}/__pycache__/code.pyc", "bytes")
    assert code_key(["plans"], room) != before, "control: its own key changes"


def test_a_room_that_does_not_exist_is_an_error(room):
    with pytest.raises(FileNotFoundError, match="no_such_room is neither a room"):
        code_key(["rules", "no_such_room"], room)


def test_every_stored_figure_names_its_rooms():
    rows = json.loads((ROOT / ROWS).read_text(encoding="utf-8"))
    assert {name for name, row in rows.items() if "line" in row} | set(FILES.values()) == ROOMS.keys(), (
        "ROOMS in harness/evidence.py"
    )
    for name in ROOMS:
        assert len(key_of(name)) == 12


def test_what_was_measured_on_other_code_is_listed(tmp_path, monkeypatch):
    """Controls: a line of this code is not listed, one without a key is, and so is one of changed code."""
    for name in ("rules", "tensors"):
        shutil.copytree(ROOT / "src" / "mupscale" / name, tmp_path / "src" / "mupscale" / name)
    monkeypatch.setattr(evidence, "ROOMS", {"fresh": ("rules",), "old": ("rules",), "lines": ("tensors",)})
    monkeypatch.setattr(evidence, "FILES", {"lines.jsonl": "lines"})
    key, other = code_key(["rules"], tmp_path), code_key(["tensors"], tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / ROWS).write_text(json.dumps({"fresh": {"line": "x=1", "key": key}, "old": {"line": "x=1"}}))
    (tmp_path / "lines.jsonl").write_text(f'{{"key": "{other}-1"}}\n{{"key": "{other}-2"}}\n')
    renew = "python docs/generate.py --benchmarks"
    assert list(stale(tmp_path)) == [f"old: {renew} old"]
    with (tmp_path / "src" / "mupscale" / "rules" / "units.py").open("a") as file:
        file.write("ANOTHER = 1\n")
    assert list(stale(tmp_path)) == [f"fresh: {renew} fresh", f"old: {renew} old"]
    (tmp_path / "lines.jsonl").write_text(f'{{"key": "{other}-1"}}\n{{"key": "2"}}\n')
    assert list(stale(tmp_path))[-1] == "lines.jsonl: 1 of 2 entries"

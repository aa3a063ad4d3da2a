"""What keeps the project easy to change: a cheap CI, a fast subset, pinned tools, promises about versions."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ci_seconds, floor

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
yaml: Any = import_module("yaml")  # it comes with transformers and has no types of its own


def test_ci_takes_at_most_an_hour_of_processor_time():
    """Control: a step that adds what is missing to the hour, and a second more, is a fault."""
    stored = json.loads(ci_seconds.STORED.read_text(encoding="utf-8"))
    assert not ci_seconds.faults(stored)
    newest = list(stored)[-1]
    rest = ci_seconds.LIMIT - sum(stored[newest].values())
    assert ci_seconds.faults({newest: {**stored[newest], "one more": rest + 1}})


def test_stored_seconds_are_of_steps_that_ci_runs():
    """Every step of the last stored run stands in the script; control: one that does not is seen."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace('"', "'")

    def stale(stored: dict[str, dict[str, float]]) -> list[str]:
        steps = stored.get("after", {})
        return [step for step in steps if f"step {step}" not in script]

    assert not stale(json.loads(ci_seconds.STORED.read_text(encoding="utf-8")))
    assert stale({"after": {"python benchmarks/nothing.py": 1.0}})


def test_a_step_is_measured_with_its_children_and_keeps_its_exit_code(tmp_path):
    """Control: sleeping takes no processor time."""
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    nested = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {burn!r}]) + 3)"
    script, file = str(ROOT / "benchmarks" / "ci_seconds.py"), tmp_path / "seconds.jsonl"
    for code in (nested, "import time; time.sleep(0.4)"):
        subprocess.run(
            [sys.executable, script, "run", str(file), sys.executable, "-S", "-c", code], check=False
        )
    burnt, slept = ci_seconds.read(file)
    assert burnt["code"] == 3
    assert burnt["cpu_seconds"] >= 0.4
    assert slept["cpu_seconds"] < 0.4
    with pytest.raises(SystemExit, match="not stored"):
        ci_seconds.record("after", file)


def test_parts_of_ci_are_those_of_its_workflow():
    """Each part is run by one job, but for `data`, which says that its data are not on GitHub; an unknown one is refused."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    known = re.search(r'^known="([^"]*)"', (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert known
    assert set(re.findall(r"run: \.ci/run (\w+)", text)) == set(known[1].split()) - {"data"}
    assert "not on GitHub" in text
    refused = subprocess.run([ROOT / ".ci" / "run", "nothing"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "no part nothing" in refused.stderr


def unpinned(workflow: str) -> list[str]:
    """Actions of a workflow that are not named by a commit with the version beside it."""
    used = re.findall(r"uses: (.*)", workflow)
    return [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)]


def test_actions_are_pinned_by_commit():
    """Controls: a tag, a branch, and a commit without the version it is."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        assert "uses: " in text
        assert not unpinned(text), path.name
    for action in ("actions/checkout@v6", "pypa/publish@release/v1", f"actions/checkout@{'0' * 40}"):
        assert unpinned(f"- uses: {action}") == [action]


def test_the_matrix_runs_the_floor_and_the_newest():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    rows = {row["python"]: row["run"] for row in jobs["tests"]["strategy"]["matrix"]["include"]}
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert rows[oldest] == "python benchmarks/floor.py"
    assert rows["3.12"] == ".ci/run tests"
    assert rows["3.13"] == "python benchmarks/floor.py --newest"


def test_the_floor_is_every_lower_bound():
    """Each requirement has a lower bound, and the floor is made of exactly those; the newest has none."""
    project = PYPROJECT["project"]
    oldest, newest = (floor.requirements(project, newest) for newest in (False, True))
    assert f"torch=={torch_bound()}" in oldest
    assert all(re.fullmatch(r"[\w\[\]-]+==[\d.]+", text) for text in oldest), oldest
    assert [text.partition("==")[0] for text in oldest] == newest


def torch_bound() -> str:
    bounds = [text for text in PYPROJECT["project"]["dependencies"] if text.startswith("torch>=")]
    return str(bounds[0]).removeprefix("torch>=")


def test_formatting_is_compared_by_one_version_of_ruff():
    dev = PYPROJECT["dependency-groups"]["dev"]
    assert f"ruff=={version('ruff')}" in dev
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"], (
        "the tools of the dev group, and no second version of them"
    )
    assert [hook["entry"].split()[:2] for hook in hooks[0]["hooks"]] == [
        ["ruff", "format"],
        ["ruff", "check"],
    ]


def test_trained_models_are_installed_by_ci_and_by_no_developer():
    groups = PYPROJECT["dependency-groups"]
    assert not [text for text in groups["dev"] if "minilm" in text]
    assert [text for text in groups["data"] if "minilm" in text]
    assert "--group dev --group data" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_fast_subset_names_files_that_exist():
    """`./check fast` hands the list to pytest; a file that was moved is noticed here first."""
    names = (ROOT / "tests" / "fast.txt").read_text(encoding="utf-8").split()
    assert len(set(names)) == len(names) >= 10
    for name in names:
        assert (ROOT / name).exists(), f"{name} in tests/fast.txt"
    assert "@tests/fast.txt" in (ROOT / "check").read_text(encoding="utf-8")


def not_shown(results: dict[str, dict[str, Any]]) -> list[str]:
    """Tests that a benchmark names and that do not exist or share no module with it."""
    own = r"from ((?:harness|benchmarks)[\w.]*) import (\w+)"
    faults = []
    for name, entry in results.items():
        script = ROOT / next(word for word in entry["command"].split() if word.endswith(".py"))
        used = {module for module, _ in re.findall(own, script.read_text())}
        for test in entry.get("tests", []):
            found = re.findall(own, (ROOT / test).read_text()) if (ROOT / test).is_file() else []
            if not any(module in used or script.stem in (leaf, *module.split(".")) for module, leaf in found):
                faults.append(f"{name}: {test}")
    return faults


def test_what_left_ci_is_shown_by_tests_with_the_benchmarks_own_functions():
    """Controls: a file that is not there, and one that does not use the benchmark."""
    results = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))
    assert "verdict_chance" in {n for n, e in results.items() if "tests" in e}
    assert not not_shown(results)
    command = results["verdict_chance"]["command"]
    for test in ("tests/no_such_test.py", "tests/rules/test_axes.py"):
        assert not_shown({"chance": {"command": command, "tests": [test]}}) == [f"chance: {test}"]

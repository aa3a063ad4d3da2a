"""What keeps the project easy to change: a fast subset, pinned tools, promises about versions."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.fresh_install import requirements

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
sys.path.insert(0, str(ROOT / ".ci"))
seconds: Any = import_module("seconds")
touched: Any = import_module("touched")
yaml: Any = import_module("yaml")  # it comes with transformers and has no types of its own


def test_parts_of_ci_are_those_of_its_workflows():
    """Every part is a job, but for `data`, whose data are not on GitHub; an unknown part is refused."""
    read = lambda name: (ROOT / name).read_text(encoding="utf-8")  # noqa: E731
    script = read(".ci/run")
    parts = set(re.findall(r"^(\w+)\(\) \{\n    (?:step|if)", script, re.MULTILINE))
    nightly = yaml.safe_load(read(".github/workflows/nightly.yml"))["jobs"]["parts"]["strategy"]["matrix"][
        "part"
    ]
    assert (
        set(re.findall(r"run: \.ci/run (\w+)", read(".github/workflows/ci.yml"))) == set(PUSH) == seconds.PUSH
    )
    assert parts == {*PUSH, *nightly, "data"}
    refused = subprocess.run([ROOT / ".ci" / "run", "nothing"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2


def test_a_step_is_measured_with_its_children_and_keeps_its_exit_code(tmp_path):
    """Control: sleeping takes no processor time."""
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    nested = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {burn!r}]) + 3)"
    log = tmp_path / "seconds.jsonl"
    for code in (nested, "import time; time.sleep(0.4)"):
        step = [sys.executable, "-S", "-c", code]
        subprocess.run([sys.executable, seconds.__file__, "run", log, "tests", *step], check=False)
    burnt, slept = seconds.read(log)
    assert (burnt["code"], slept["code"]) == (3, 0)
    assert burnt["cpu"] >= 0.4 > slept["cpu"]


def test_a_whole_run_is_judged_by_its_own_seconds():
    """Seconds of a slow machine count less. Controls: one second above the limit, a failed step; one part has no limit."""
    steps = [{"part": part, "step": part, "cpu": seconds.LIMIT / 4, "code": 0} for part in PUSH]
    assert not seconds.failures(steps)
    more = {"part": "tests", "step": "one more", "cpu": 1.0, "code": 0}
    assert seconds.failures([*steps, more])
    assert not seconds.failures([{**step, "cpu": 2 * step["cpu"], "slow": 2.0} for step in steps])
    assert seconds.failures([{**step, "cpu": 2 * step["cpu"], "slow": 1.9} for step in steps])
    assert not seconds.failures([{**more, "cpu": 2 * seconds.LIMIT}])
    assert seconds.failures([{**more, "code": 1}])


def test_a_change_runs_what_it_can_touch(tmp_path):
    """Controls: a file that nothing imports touches nothing else, and a name for type checkers is no import."""
    sources = {
        "src/mupscale/__init__.py": "if TYPE_CHECKING:\n    from .training.grow import grow as grow\n"
        "__getattr__ = exported(__name__)\n",
        "src/mupscale/training/__init__.py": "",
        "src/mupscale/training/grow.py": "from ..rules import units",
        "src/mupscale/rules/__init__.py": "",
        "src/mupscale/rules/units.py": "",
        "src/mupscale/rules/alone.py": "",
        "tests/test_grow.py": "import mupscale as mu\nmu.grow()",
        "tests/test_other.py": "import mupscale as mu\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from mupscale.rules import units\n",
        "benchmarks/zoo.py": "def f():\n    from mupscale.training import grow",
    }
    tests, *programs = touched.commands(["src/mupscale/rules/units.py"], sources)
    assert tests.split()[-2:] == ["tests/test_grow.py", "src/mupscale/rules/units.py"]
    assert {line.split()[1] for line in programs} == {"benchmarks/zoo.py"}
    alone = touched.commands(["src/mupscale/rules/alone.py"], sources)
    assert alone == ["python -m pytest -n 2 --dist loadfile src/mupscale/rules/alone.py"]
    assert "tests/project" in touched.commands(["docs/index.md"], sources)[0]


def unpinned(workflow: str) -> list[str]:
    """Actions of a workflow that are not named by a commit with the version next to it."""
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
    oldest, newest = (requirements(project, newest) for newest in (False, True))
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


PUSH = ("static", "tests", "exactness", "survival")
"""The parts of .ci/run that every change passes. Its other parts are those of the nightly run."""


def programs(text: str) -> set[str]:
    """The programs of benchmarks/ that a script runs, with their options but for --quick.

    >>> sorted(programs("step python benchmarks/zoo.py --quick; step python benchmarks/zoo.py --control"))
    ['zoo', 'zoo --control']
    """
    found = re.findall(r"benchmarks/(\w+)\.py((?: --?\w[\w-]*(?: \w+)?)*)", text)
    return {f"{name} {options.replace('--quick', '').strip()}".strip() for name, options in found}


def misplaced(results: dict[str, dict[str, Any]], script: str, nightly: str, release: str) -> list[str]:
    """Rows that say another place than the one where their program runs, and programs without a row."""
    parts = dict(re.findall(r"^(\w+)\(\) \{\n(.*?)^\}", script, re.M | re.S))
    push = programs("".join(parts[part] for part in PUSH))
    night = programs("".join(text for part, text in parts.items() if part not in PUSH) + nightly)
    places = {"push": push, "nightly": night, "release": programs(release.replace(" --keep dist", ""))}
    rows = {name.partition(" ")[0] for entry in results.values() for name in programs(entry["command"])}
    rows |= results.keys()
    names = sorted({name.partition(" ")[0] for name in push | night})
    faults = [f"{name}: no row in docs/benchmarks.json" for name in names if name not in rows]
    for name, entry in results.items():
        if not entry.get("line") and "pytest" not in entry["command"]:
            faults.append(f"{name}: no line is recorded")
        runs = [place for place, there in places.items() if programs(entry["command"]) & there]
        if "pytest" in entry["command"] and "-m engine" not in entry["command"]:
            runs.append("nightly" if "-m nightly" in entry["command"] else "push")
        if entry["shown"] not in (*places, "by hand"):
            faults.append(f"{name}: {entry['shown']!r} is no place")
        elif entry["shown"] == "by hand" and runs:
            faults.append(f"{name}: by hand, and yet {runs[0]} runs it")
        elif entry["shown"] != "by hand" and entry["shown"] not in runs and "tests" not in entry:
            faults.append(f"{name}: {entry['shown']} does not run it, and no tests are named")
        elif "push" in runs and not entry["command"].endswith("--popular") and entry["shown"] != "push":
            faults.append(f"{name}: every push runs it")
    return faults


def test_benchmarks_say_where_they_are_shown():
    """Controls: another place, none, a program without a row, a row without a line, tests that stand for the program."""
    results = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))
    files = (".ci/run", ".github/workflows/nightly.yml", ".github/workflows/release.yml")
    assert not misplaced(results, *((ROOT / name).read_text(encoding="utf-8") for name in files))

    parts = {**dict.fromkeys(PUSH, ""), "exactness": "step python benchmarks/zoo.py --quick", "figures": ""}
    script = "".join(f"{part}() {{\n    {text}\n}}\n" for part, text in parts.items())
    row = {"command": "python benchmarks/zoo.py", "line": "models=1", "shown": "push"}

    def found(changed: dict[str, Any], nightly: str = "") -> list[str]:
        return misplaced({"zoo": {**row, **changed}}, script, nightly, "")

    assert found({}) == []
    assert found({"shown": "nightly"}) == ["zoo: nightly does not run it, and no tests are named"]
    assert found({"shown": "nightly"}, "benchmarks/zoo.py") == ["zoo: every push runs it"]
    assert found({"shown": "by hand"}) == ["zoo: by hand, and yet push runs it"]
    assert found({"shown": "weekly"}) == ["zoo: 'weekly' is no place"]
    assert found({"line": None}) == ["zoo: no line is recorded"]
    assert found({}, "benchmarks/limits.py") == ["limits: no row in docs/benchmarks.json"]
    assert (
        found({"shown": "nightly", "tests": ["tests/planning/test_zoo.py"], "command": "benchmarks/x.py"})
        == []
    )

"""The command line: exit codes, messages, one style of help, the demo as a stranger runs it."""

import argparse
import json
import os
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import mupscale
from mupscale.cli import demo
from mupscale.cli.main import main, parser

VERBS: dict[str, argparse.ArgumentParser] = parser()._subparsers._group_actions[0].choices  # type: ignore


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"mupscale {mupscale.__version__}"


def test_the_demo_shows_the_theorem_and_writes_a_figure(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mupscale.cli.main", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the theorem holds" in done.stdout
    assert (tmp_path / "mupscale-demo.png").stat().st_size > 10_000


def test_the_demo_fails_when_the_theorem_does_not_hold(monkeypatch, tmp_path, capsys):
    early, base, _, control = demo.train(30)
    monkeypatch.setattr(demo, "train", lambda steps: (early, base, control, control))
    assert main(["demo", "--steps", "30", "--plot", str(tmp_path / "x.png")]) == 1
    assert "does NOT hold" in capsys.readouterr().out


def test_a_refused_request_is_one_message_and_exit_code_2(capsys):
    assert main(["demo", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "mupscale: --steps 0: at least one step is needed to compare\n"


def test_the_verbs_are_those_of_the_readme():
    assert list(VERBS) == [
        "plan", "widen", "upscale", "check", "tune", "report", "cost", "demo", "doctor",
    ]  # fmt: skip
    for name in VERBS:
        assert name in parser().format_help()


@pytest.mark.parametrize("name", VERBS)
def test_help_has_one_style_and_its_examples_can_be_typed(name):
    verb = VERBS[name]
    assert verb.description
    assert verb.description[0].isupper()
    assert verb.description.endswith(".")
    assert all(action.help for action in verb._actions), "every argument says what it is"
    assert verb.epilog
    lines = [line.strip() for line in verb.epilog.splitlines() if line.startswith("  ")]
    assert lines
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "mupscale"
        assert parser().parse_args(arguments).verb == name, line
    assert all(len(line) <= 120 for line in verb.format_help().splitlines())


BLOCK = """
import os, sys
for name in os.environ.get("MUPSCALE_TEST_WITHOUT", "").split():
    sys.modules[name] = None
"""
RUN = """
import json, sys, io, contextlib
from mupscale.cli.main import main
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(line)
    print(json.dumps([code, said.getvalue()]))
"""


def test_without_extras_every_verb_says_in_one_line_what_to_install(tmp_path):
    """The packages are blocked in every process that is started, as if they were not installed."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    base, proxy = tmp_path / "base", tmp_path / "proxy.py"
    base.mkdir()
    save_file({"w": torch.zeros(2)}, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "llama"}))
    proxy.write_text("def build(width): ...\ndef train(run, steps, report): ...\n")
    hf, tune = "pip install 'mupscale[hf]'", "pip install 'mupscale[tune"
    sizes = ["--proxy", "8", "--steps", "9", "--batch", "2", "--context", "4"]
    cases = [
        (["plan", str(base), "-k", "2"], "transformers", hf),
        (["widen", str(base), str(tmp_path / "wide"), "-k", "2"], "transformers", hf),
        (["upscale", str(base), str(tmp_path / "wide"), "-k", "2", "--noise", "t=0.2"], "transformers", hf),
        (["cost", str(base), "-k", "2", *sizes], "transformers", hf),
        (["tune", str(proxy), "--width", "8", "-k", "2", "--steps", "4"], "optuna", tune),
        (["report", str(tmp_path)], "optuna", tune),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "MUPSCALE_TEST_WITHOUT": "transformers accelerate optuna sqlalchemy psycopg matplotlib lightning numba",
    }
    lines = json.dumps([line for line, *_ in cases] + [["demo", "--steps", "20"], ["doctor"]])
    done = subprocess.run(
        [sys.executable, "-c", RUN, lines], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    for (line, package, remedy), (code, text) in zip(cases, said, strict=False):
        assert code == 2, (line, text)
        last = text.strip().splitlines()[-1]
        assert last.startswith("mupscale: "), (line, text)
        assert package in last, (line, text)
        assert remedy in last, (line, text)
        assert "Traceback" not in text
    assert said[-2][0] == 0, "the demo needs no extra"
    assert "pip install 'mupscale[plot]'" in said[-2][1]
    assert said[-1][0] == 0, "and neither does the doctor"

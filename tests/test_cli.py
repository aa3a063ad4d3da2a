"""The command line: exit codes, messages, the demo as a stranger runs it."""

import subprocess
import sys

import pytest

import mupscale
from mupscale.cli import demo
from mupscale.cli.main import main, parser


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


def test_every_verb_has_help():
    assert "demo" in parser().format_help()

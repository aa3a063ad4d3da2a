"""The command line: exit codes, messages, one style of help, the demo as a stranger runs it."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mupscale
from mupscale.checkpoints.noise_words import parse_noise
from mupscale.checkpoints.request import Request
from mupscale.checkpoints.resume import check_same
from mupscale.cli import demo
from mupscale.cli import grow as grow
from mupscale.cli.main import main, parser
from mupscale.cli.options.plan import goal_of
from mupscale.cli.options.verb import STATUS, Parser
from mupscale.families.config.goal import Goal
from mupscale.families.loaded import Losses
from mupscale.training.check.demo import train
from mupscale.training.recipe import Recipe

VERBS: dict[str, argparse.ArgumentParser] = parser()._subparsers._group_actions[0].choices  # type: ignore


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"mupscale {mupscale.__version__}"


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "mupscale", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"mupscale {mupscale.__version__}\n")


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("3kB", 3000), ("3KB", 3000), ("2.5 MB", 2_500_000), ("5g", 5 * 10**9), ("1TB", 10**12)]
)  # fmt: skip
def test_sizes_from_kilobytes_to_terabytes(text, count):
    chosen = parser().parse_args(["grow", "a", "b", "-k", "2", "--shard-size", text])
    assert chosen.shard_size == count


@pytest.mark.parametrize("text", ["0", "0.0001kB", "-1MB", "5PB", "5MiB", "B"])
def test_sizes_that_are_none(text, capsys):
    """Control: no unit is guessed, and no file has zero bytes."""
    with pytest.raises(SystemExit):
        parser().parse_args(["grow", "a", "b", "-k", "2", f"--shard-size={text}"])
    told = capsys.readouterr().err
    assert "--shard-size" in told
    assert "[usage]" in told


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
    early, base, _, control = train(30)
    monkeypatch.setattr(demo, "train", lambda steps: (early, base, control, control))
    assert main(["demo", "--steps", "30", "--plot", str(tmp_path / "x.png")]) == 1
    assert "does NOT hold" in capsys.readouterr().out


def test_a_refused_request_is_one_message_and_exit_code_2(capsys):
    assert main(["demo", "--steps", "0"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("mupscale: --steps 0")
    assert line.endswith("[option.below_one]")


def test_json_holds_what_was_found_or_the_codes_of_the_refusal(tmp_path, capsys):
    file = tmp_path / "demo.json"
    words = ["demo", "--plot", str(tmp_path / "x.png"), "--json", str(file), "--steps"]
    assert main([*words, "20"]) == 0
    told = json.loads(file.read_text())
    assert (told["verb"], told["status"], told["holds"]) == ("demo", 0, True)
    assert len(told["losses"]["wide"]) == 20
    assert main([*words, "0"]) == 2
    told = json.loads(file.read_text())
    assert (told["status"], told["refused"]["codes"]) == (2, ["option.below_one"])
    assert main(["demo", "--steps", "0", "--json", str(tmp_path)]) == 2
    assert "[option.not_a_file_name]" in capsys.readouterr().err, "control: nothing is guessed about the file"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_takes_json_and_names_its_exit_codes(name):
    assert "--json" in VERBS[name]._option_string_actions
    assert STATUS in (VERBS[name].epilog or "")


def test_the_verbs_are_those_of_the_readme():
    assert list(VERBS) == [
        "plan", "grow", "upscale", "check", "same", "tune", "report", "cost", "demo", "doctor",
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


def test_the_help_of_upscale_fits_on_two_screens(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(VERBS["upscale"].format_help().splitlines()) <= 2 * 40


@pytest.mark.parametrize(
    ("parts", "to"),
    [
        ("--layers 8 --after 1:3 --hidden 96", "layers=8,after=1:3,hidden=96"),
        ("--vocab +64 --positions 512", "vocab=+64,positions=512"),
        (
            "--experts 8 --top-k 2 --expert-ffn 64 --into mixtral",
            "experts=8,top_k=2,expert_ffn=64,into=mixtral",
        ),
        ("--layers 8 --to heads=6", "layers=8,heads=6"),
    ],
)
def test_options_of_parts_say_what_one_text_says(parts, to):
    chosen = parser().parse_args(shlex.split(f"plan base -k ffn=2 {parts}"))
    assert goal_of(chosen) == Goal.parse("ffn=2", to)


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("grow a b -k 2 --workers 2", "--threads"),
        ("upscale a b -k 2 --worker 0/2", "--share"),
        ("upscale a b -k 2 --batch x.json", "--inputs"),
        ("check a --base b --bytes", "--levels"),
    ],
)
def test_an_option_of_an_earlier_version_is_named_with_its_new_name(words, now, capsys):
    with pytest.raises(SystemExit):
        main(shlex.split(words))
    assert f" {now}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "kept"), [("upscale", True), ("tune", True), ("demo", False), ("check", False)]
)
def test_an_interrupt_says_whether_the_same_command_goes_on(verb, kept, monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt

    words = {
        "upscale": "upscale base wide -k 2",
        "tune": "tune sound.py --width 8 -k 2 --steps 4",
        "check": "check wide --base base",
    }.get(verb, verb)
    chosen = parser().parse_args(shlex.split(words))
    chosen.run = stop
    monkeypatch.setattr(Parser, "parse_args", lambda *_: chosen)
    assert main([]) == 130
    assert ("run the same command again" in capsys.readouterr().err) == kept


def test_a_job_begun_with_a_recipe_does_not_go_on_with_noise(tmp_path):
    """Nor the other way round; the same request continues."""
    recipe = Recipe("torch.optim.AdamW", {"lr": 1e-3}, 0.1, k=2, tensors={})
    tuned, noisy = Request(Goal.parse(2), recipe=recipe), Request(Goal.parse(2), noise=("t", 0.2))
    for before in (tuned, noisy):
        job: Any = SimpleNamespace(base=tmp_path, out=tmp_path / "wide", about={"request": before.as_json()})
        for now in (tuned, noisy):
            try:
                check_same(job, tmp_path, now, None)
                found = set()
            except mupscale.MupscaleError as error:
                found = {fault.where for fault in error.faults}
            assert found == (set() if now is before else {"recipe", "noise"})


def test_a_reader_that_has_read_enough_is_no_error():
    command = [
        sys.executable,
        "-c",
        "import sys; from mupscale.cli.main import main; sys.exit(main(['cost', *'--params 4103 --spent 1e11 --budget 1e11 --wide-params 14343'.split()]))",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == ""
    assert done.returncode == 141


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
        (["grow", str(base), str(tmp_path / "wide"), "-k", "2"], "transformers", hf),
        (["upscale", str(base), str(tmp_path / "wide"), "-k", "2", "--noise", "t=0.2"], "transformers", hf),
        (["cost", str(base), "-k", "2", *sizes], "transformers", hf),
        (["tune", str(proxy), "--width", "8", "-k", "2", "--steps", "4"], "optuna", tune),
        (["report", str(tmp_path)], "optuna", tune),
        (["plan", "s3://bucket/base", "-k", "2"], "fsspec", "pip install 'mupscale[remote]'"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "MUPSCALE_TEST_WITHOUT": "transformers accelerate optuna sqlalchemy psycopg matplotlib lightning numba fsspec s3fs",
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
        assert last.endswith("[extra.missing]"), (line, text)
        assert package in last, (line, text)
        assert remedy in last, (line, text)
        assert "Traceback" not in text
    assert said[-2][0] == 0, "the demo needs no extra"
    assert "pip install 'mupscale[plot]'" in said[-2][1]
    assert said[-1][0] == 0, "and neither does the doctor"


@pytest.mark.parametrize(
    ("losses", "noise", "text"),
    [((1.703273, 4.502408), "t=0.2", "write --noise auto, or t=0.1"), ((1.7, 4.5), None, "write less noise"), ((1.7, 1.8), "t=0.2", "")],
)  # fmt: skip
def test_a_jump_of_the_batch_is_warned_of(losses, noise, text):
    request = Request(Goal.parse(2), noise=None if noise is None else parse_noise(noise))
    told = grow._costs(Losses(losses[0], losses[1], "loss", "x.json"), request).splitlines()
    assert told[0] == f"loss of x.json: {losses[0]:.4f} before noise (the base's), {losses[1]:.4f} after"
    assert len(told) == (2 if text else 1), "the last one is the control: a rise that is no jump"
    assert told[-1].startswith("warning: noise raises the loss from") == bool(text)
    assert text in told[-1]

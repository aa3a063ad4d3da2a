"""Norms of a base that workers measure together: each once, the same digits, and none of another base."""

import os
import shutil
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

from mupscale.cli.main import main  # noqa: E402
from mupscale.jobs.bytes.blocks import StoredBase  # noqa: E402
from mupscale.jobs.norms import measured as norms  # noqa: E402
from mupscale.jobs.norms.norm_journal import NormJournal  # noqa: E402
from mupscale.jobs.partial import partial  # noqa: E402
from mupscale.noise.measures import Statistic, Wanted, statistic  # noqa: E402
from mupscale.runs.growth_record import read_about  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def measured(monkeypatch):
    """How often a norm was measured."""
    count: list[tuple[int, ...]] = []
    real = norms.measured_by

    def measure(parts, shape, stacked):
        count.append(shape)
        return real(parts, shape, stacked)

    monkeypatch.setattr(norms, "measured_by", measure)
    return count


def upscale(base, out, *words):
    arguments = ["upscale", str(base), str(out), "-k", "2", "--noise", "t=0.1", "--no-loss", "--quiet"]
    return main([*arguments, *words])


def sigmas(out):
    about = read_about(out)
    assert about is not None
    return about["noise"]["sigmas"]


def test_workers_measure_every_norm_once_and_find_the_digits_of_one_process(base, tmp_path, measured):
    assert upscale(base, tmp_path / "one") == 0
    alone = len(measured)
    assert alone >= 15
    for worker in range(3):  # one after the other: the job is known to the second and third
        assert upscale(base, tmp_path / "three", "--share", f"{worker}/3") == 0
    assert len(measured) == 2 * alone
    assert sigmas(tmp_path / "three") == sigmas(tmp_path / "one")
    assert upscale(base, tmp_path / "threads", "--threads", "2") == 0
    assert sigmas(tmp_path / "threads") == sigmas(tmp_path / "one")
    assert not [name for name in os.listdir(tmp_path / "one") if name.startswith("norms-")]


def test_what_a_killed_run_has_measured_is_not_measured_again(base, tmp_path, measured, monkeypatch):
    real = NormJournal.add

    def killed(self, wanted, found, used):
        real(self, wanted, found, used)
        if len(measured) >= 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NormJournal, "add", killed)
        assert upscale(base, tmp_path / "out") != 0
    assert upscale(base, tmp_path / "out") == 0
    once = len(measured)
    assert upscale(base, tmp_path / "other") == 0
    assert len(measured) - once == once, "control: another output measures all of them"
    assert sigmas(tmp_path / "out") == sigmas(tmp_path / "other")


def test_a_base_that_has_changed_is_measured_again(base, tmp_path, measured):
    out, file = tmp_path / "out", "model.safetensors"
    name: Wanted = ("model.layers.0.mlp.up_proj.weight", "norm")
    NormJournal(out, base, [file]).add(name, torch.tensor(3.0), [])
    assert NormJournal(out, base, [file]).known() == {name: torch.tensor(3.0)}
    status = os.stat(base / file)
    os.utime(base / file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    try:
        assert NormJournal(out, base, [file]).known() == {}
    finally:
        os.utime(base / file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("when", ["before the last norm", "before the first block"])
def test_norms_of_other_bytes_than_blocks_have_used_are_refused(base, tmp_path, monkeypatch, when, capsys):
    """Also if the size and the time of change are as before, so that the journal of norms counts."""
    wide, changed, file = tmp_path / "out", shutil.copytree(base, tmp_path / "base"), "model.safetensors"
    real, seen = NormJournal.add, []

    def killed(self, wanted, found, used):
        real(self, wanted, found, used)
        seen.append(wanted)
        if len(seen) == (5 if when == "before the last norm" else 15):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NormJournal, "add", killed)
        assert upscale(changed, wide) != 0
    status, weights = os.stat(changed / file), load_file(changed / file)
    save_file({name: weight * 50 for name, weight in weights.items()}, changed / file, {"format": "pt"})
    os.utime(changed / file, ns=(status.st_atime_ns, status.st_mtime_ns))
    capsys.readouterr()
    assert upscale(changed, wide) == 2
    assert "[job.base_bytes_changed]" in capsys.readouterr().err
    assert not wide.exists()
    shutil.rmtree(partial(wide))
    assert upscale(changed, wide) == 0, "what the message says was tried"


def test_check_sees_noise_of_the_wrong_size(base, tmp_path, capsys):
    """The bytes follow from the size that was recorded, so only another measurement tells."""
    name: Wanted = ("model.layers.0.mlp.up_proj.weight", "norm")
    for out, worth in ((tmp_path / "right", None), (tmp_path / "wrong", 0.01)):
        if worth is not None:
            NormJournal(out, base, ["model.safetensors"]).add(name, torch.tensor(worth), [])
        assert upscale(base, out) == 0
        capsys.readouterr()
        assert main(["check", str(out), "--base", str(base), "--quiet"]) == (worth is not None)
        said = capsys.readouterr().out.splitlines()
        assert [line for line in said if "[growth.noise_differs]" in line and name[0] in line] == said[3:]


def test_a_line_that_is_cut_off_does_not_count(base, tmp_path):
    journal = NormJournal(tmp_path / "out", base, ["model.safetensors"])
    journal.add(("a", "norm"), torch.tensor(1.5), [])
    journal.add(("b", "norms"), torch.tensor([1.0, 2.0]), [])
    (path,) = partial(tmp_path / "out").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert list(journal.known()) == [("a", "norm")]


def test_a_dry_run_writes_nothing(base, tmp_path):
    assert upscale(base, tmp_path / "out", "--dry-run") == 0
    assert list(tmp_path.iterdir()) == []


ROWS = (((1, 0, 0), (2, 6, 5)), ((0, 0, 0), (1, 6, 5)))
BOTH = tuple(((i, low, 0), (1, n, 5)) for i in (2, 0, 1) for low, n in ((4, 2), (0, 4)))


@pytest.mark.parametrize("cut", [ROWS, BOTH], ids=["by rows", "by rows and columns"])
@pytest.mark.parametrize("what", get_args(Statistic))
def test_a_statistic_that_is_read_in_rows_is_that_of_the_whole(what, cut, monkeypatch):
    whole = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(0))

    def read_(start, out):
        out.copy_(whole[tuple(slice(low, low + n) for low, n in zip(start, out.shape, strict=True))])

    monkeypatch.setattr(norms, "_STRETCH", 100)
    parts = [StoredBase(whole.dtype, start, shape, read_) for start, shape in cut]
    found = norms.measured_by(parts, (3, 6, 5), what)
    assert torch.allclose(found.reshape(-1), statistic(whole, what).reshape(-1), rtol=1e-9)

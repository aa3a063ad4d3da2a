"""The doctor: what it prints, when it fails, and that what it knows of extras is what the package states."""

import re
from importlib.metadata import requires

import pytest
import torch

from harness.refusals import refused
from mupscale.cli import device_report, doctor
from mupscale.cli.main import main
from mupscale.extras import EXTRAS, needs


def stated() -> dict[str, set[str]]:
    """Extra -> packages, by the metadata of the installed package; `all` is the others together."""
    found: dict[str, set[str]] = {}
    for line in requires("mupscale") or []:
        match = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", line)
        if match and match[2] != "all" and match[1] != "mupscale":
            found.setdefault(match[2], set()).add(match[1])
    return found


def test_extras_are_those_of_the_package():
    assert {name: set(extra.packages) for name, extra in EXTRAS.items()} == stated()


def test_a_package_that_does_not_import_is_named_and_another_one_is_left_alone():
    with refused("extra.broken", where=("optuna", "mupscale[tune]")), needs("x", "tune"):
        raise ImportError("no symbol", name="optuna.storages")
    with pytest.raises(ImportError, match="no symbol"), needs("x", "tune"):
        raise ImportError("no symbol", name="numpy.core")


def test_it_shows_versions_threads_disk_and_extras(capsys, tmp_path):
    assert main(["doctor", "--disk", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for word in ("mupscale", "python", "torch", "numpy", "safetensors", "cores", "free in", *EXTRAS):
        assert word in said
    assert re.search(r"exact on this machine; losses differ by \de-1\d, without the new units by", said)


def test_a_missing_extra_is_no_fault_and_an_old_package_is(capsys, monkeypatch):
    known = doctor.installed
    everything = lambda name: known(name) or "99.0"  # noqa: E731, trackers may be missing here
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "optuna" else everything(name))
    assert main(["doctor"]) == 0
    assert "pip install 'mupscale[tune]'" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "installed", lambda name: "0.1" if name == "optuna" else known(name))
    assert main(["doctor"]) == 1
    assert "too old: pip install --upgrade 'optuna>=5.0'" in capsys.readouterr().out


@pytest.mark.parametrize("gaps", [(1e-3, 1.0), (1e-16, 1e-9)], ids=["not exact", "control too"])
def test_it_fails_when_widening_is_not_exact_here(capsys, monkeypatch, gaps):
    monkeypatch.setattr(doctor, "_measured", lambda: gaps)
    assert main(["doctor"]) == 1
    assert "NOT exact on this machine" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused(capsys):
    assert main(["doctor", "--disk", "/no/such/folder"]) == 2
    assert "[option.not_a_folder]" in capsys.readouterr().err


def test_the_report_of_a_device_proves_beside_controls_and_fails_with_one_of_them(capsys, monkeypatch):
    assert main(["doctor", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    report = said.split("```")[1]
    assert "0 of 60 noisy slices differ" in report
    assert "0 of 12 widened tensors differ" in report
    assert report.count("holds") == 6
    assert "times a copy on the device" in report
    assert "python -m pytest -m gpu" in report, "it is printed, not run"
    monkeypatch.setattr(device_report, "_autocast", lambda device: 1.0)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "autocast           FAILS" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_plain_line(capsys):
    assert main(["doctor", "--device", "cuda"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "[option.no_such_device]" in lines[0]

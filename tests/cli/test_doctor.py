"""The doctor: what it prints, when it fails, and that what it knows of extras is what the package states."""

import re
from dataclasses import replace
from importlib.metadata import requires

import pytest
import torch

from harness.refusals import refused
from mupscale.cli import doctor
from mupscale.cli.main import main
from mupscale.extras import EXTRAS, needs
from mupscale.tensors.triton import compare as slices
from mupscale.tensors.triton import launch
from mupscale.training.check import device_proofs, first_lines


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
    assert re.search(r"exact on this machine; losses differ by \de-1\d, .* by \d", said)


def test_a_missing_extra_is_no_fault_and_an_old_package_is(capsys, monkeypatch):
    known = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "optuna" else known(name))
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


def test_the_report_of_a_device_proves_beside_controls(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    report = said.split("```")[1]
    assert "0 of 60 noisy slices differ" in report
    assert "0 of 12 widened tensors differ" in report
    assert report.count("holds") == 9
    assert re.search(
        r"README +holds +verify .*before growing.*a loss that reads the width is refused", report
    )
    assert "times a copy on the device" in report
    assert "python -m pytest -m gpu" in report, "it is printed, not run"


PARTS = {
    "noise bits": (device_proofs, "_slices"),
    "exact bits": (device_proofs, "_exact_bits"),
    "AdamW, fused": (device_proofs, "_adamw"),
    "autocast": (device_proofs, "_autocast_holds"),
    "README": (first_lines, "readme"),
    "tutorial": (first_lines, "tutorial"),
    "search": (first_lines, "search"),
}


@pytest.fixture
def quick(monkeypatch):
    """Every part of the report holds at once."""
    for module, name in PARTS.values():
        monkeypatch.setattr(module, name, lambda *given: ("as it should be", True))
    monkeypatch.setattr(device_proofs, "timing", lambda device: "none")
    monkeypatch.setattr(doctor, "_measured", lambda: (1e-16, 1.0))


def raises(*given):
    raise RuntimeError("Expected all tensors to be on the same device\nand more")


@pytest.mark.parametrize("broken", [lambda *given: ("off", False), raises], ids=["fails", "raises"])
@pytest.mark.parametrize("part", PARTS)
def test_the_report_fails_with_any_part_of_it(part, broken, quick, capsys, monkeypatch):
    monkeypatch.setattr(*PARTS[part], broken)
    assert main(["doctor", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert re.search(rf"^{part} +FAILS", said, re.MULTILINE)
    assert "and more" not in said, "one line for each part"


def test_the_report_holds_where_every_part_does(quick, capsys):
    """Control."""
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "FAILS" not in capsys.readouterr().out


def test_the_triton_kernel_is_compared_where_triton_is(quick, capsys, monkeypatch):
    monkeypatch.setattr(launch, "installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device_proofs, "_slices", lambda device, kernel: (kernel, kernel != "triton"))
    assert main(["doctor", "--device", "cpu"]) == 1
    assert re.search("^Triton kernel +FAILS  triton", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(launch, "installed", lambda: False)
    assert main(["doctor", "--device", "cpu"]) == 0


def test_a_kernel_with_other_bits_fails_and_so_does_one_that_was_not_used(monkeypatch):
    device, found = torch.device("cpu"), slices.compare_slices(6, "cpu")
    for kernel, launched, different, holds in (
        ("portable", 0, (), True),
        ("triton", 6, (), True),
        ("triton", 0, (), False),
        ("triton", 6, ("plain",), False),
    ):
        made = replace(found, kernel=launched, different=different)
        monkeypatch.setattr(device_proofs, "compare_slices", lambda *given, made=made, **named: made)
        assert device_proofs._slices(device, kernel)[1] is holds


def test_the_first_lines_fail_where_growing_is_wrong(monkeypatch):
    """Controls: each reports what is broken, not only what raises."""
    here = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(first_lines, "_is_refused", lambda call: False)
        assert not first_lines.readme(here)[1]
    with monkeypatch.context() as patch:
        patch.setattr(first_lines, "_is_on", lambda model, device: False)
        assert not first_lines.tutorial(here)[1]
    plans = iter(
        [first_lines._plan_of(here, torch.zeros(2, 3, 4) + 1, interleaved=i) for i in (False, True)] * 2
    )
    monkeypatch.setattr(first_lines, "_plan_of", lambda *given, **named: next(plans))
    assert not first_lines.search(here)[1]


@pytest.mark.parametrize("name", ["cuda:99", "mps:7", "vulkan", "meta", "no-such-device", ""])
def test_a_device_that_is_not_there_is_one_plain_line(name, capsys):
    assert main(["doctor", "--device", name]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "[option.no_such_device]" in lines[0]

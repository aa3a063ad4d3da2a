"""The Triton kernel makes a slice only where it is asked for; the portable code is the default on every device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.refusals import refused
from mupscale.tensors.compiled import VARIABLE
from mupscale.tensors.noise import TensorNoise
from mupscale.tensors.philox import Stream
from mupscale.tensors.triton import launch

NOISE = TensorNoise(Stream(0, "w"), 0.1)


def slice_on(kind: str) -> Any:
    """What the choice reads of a tensor."""
    return SimpleNamespace(device=torch.device(kind), dtype=torch.float32, dim=lambda: 2)


@pytest.mark.parametrize(
    ("choice", "used"), [("", False), ("portable", False), ("compiled", False), ("triton", True)]
)
def test_cuda_uses_the_kernel_only_when_it_is_asked_for(choice, used, monkeypatch):
    monkeypatch.setenv(VARIABLE, choice)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "installed", lambda: True)
    assert launch.is_for(slice_on("cuda"), None, NOISE) is used
    for kind in ("cpu", "mps", "xpu"):
        assert not launch.is_for(slice_on(kind), None, NOISE)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launch.is_for(slice_on("cpu"), None, NOISE) is used


def test_a_kernel_that_is_asked_for_and_not_installed_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "installed", lambda: False)
    with refused("extra.missing", where=("triton", VARIABLE)):
        launch.is_for(slice_on("cuda"), None, NOISE)
    assert not launch.is_for(slice_on("cpu"), None, NOISE), "control"
    monkeypatch.setenv(VARIABLE, "fast")
    with refused("kernel.unknown_choice", where="'fast'"):
        launch.is_for(slice_on("cuda"), None, NOISE)

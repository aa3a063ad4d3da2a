"""A certificate cannot say "exact" with an error above its tolerance."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import mupscale as mu
from mupscale.proofs.certificate import Failure

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def mlp(width):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


@pytest.fixture
def certificate():
    return mu.verify(mlp(4), lambda: mlp(8), loss=lambda model: model(X.double()).sum())


def test_a_certificate_that_contradicts_itself_is_refused(certificate):
    for wrong in (
        {"wide_losses": (certificate.base_losses[0] * 2,)},
        {"tensors": (replace(certificate.tensors[0], gradient=1e-3),)},
        {"tensors": (replace(certificate.tensors[0], weight=float("nan")),)},
        {"tolerance": -1.0},
    ):
        with pytest.raises(mu.MupscaleError, match="contradicts itself"):
            replace(certificate, **wrong)
        broken = replace(certificate, failure=Failure(0, "loss", "differs", ""), **wrong)
        assert not broken.holds, "control: with a failure it is a certificate that does not hold"
    assert replace(certificate, memory=1).holds, "control: what was measured is accepted"


def test_a_silent_tensor_does_not_count(certificate):
    first = replace(certificate.tensors[0], gradient=1.0, silent=True)
    assert replace(certificate, tensors=(first, *certificate.tensors[1:])).holds

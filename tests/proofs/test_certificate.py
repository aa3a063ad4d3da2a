"""A certificate cannot say "exact" with an error above its tolerance."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.proofs.causes import CLIPPING, OPTIMIZER
from mupscale.proofs.certificate import Failure
from mupscale.proofs.diagnose import suspect
from mupscale.proofs.identity import Identity
from mupscale.proofs.trial import Trial

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
        with refused("proof.contradicts_itself"):
            replace(certificate, **wrong)
        broken = replace(certificate, failure=Failure(0, "loss", "differs", "", "loss"), **wrong)
        assert not broken.holds, "control: with a failure it is a certificate that does not hold"
    assert replace(certificate, memory=1).holds, "control: what was measured is accepted"


def test_a_silent_tensor_does_not_count(certificate):
    first = replace(certificate.tensors[0], gradient=1.0, silent=True)
    assert replace(certificate, tensors=(first, *certificate.tensors[1:])).holds


class Gated(nn.Module):
    """A branch behind a ReLU that never opens: its gradient is exactly zero, and only its state moves it."""

    def __init__(self, width):
        super().__init__()
        self.first, self.gated, self.last = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + torch.relu(self.gated(hidden) - 1e6))


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_weight_without_gradient_that_moves_otherwise_is_a_failure(spoiled):
    """Control: with the state that was carried, the certificate holds."""

    def step(run, i):
        run.optimizer.zero_grad()
        loss = (run.model(X.to(run.model.first.weight)) - 1).square().mean()
        loss.backward()
        run.optimizer.step()
        return loss

    base = Gated(4)
    run = mu.Run(base, torch.optim.SGD(base.parameters(), lr=0.1, momentum=0.9))
    step(run, 0)
    wide = mu.grow(run, lambda: Gated(8), prove=False)
    if spoiled:
        weight = wide.model.get_parameter("gated.weight")
        wide.optimizer.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    found = mu.verify(run, wide, step=step, steps=3)
    assert found.holds is not spoiled
    assert (found.failure.where if found.failure else None) == ("gated.weight" if spoiled else None)


def test_a_certificate_is_true_when_it_holds(certificate):
    broken = replace(certificate, failure=Failure(0, "loss", "differs", "", "loss"))
    assert (bool(certificate), bool(broken)) == (True, False)


def test_programs_decide_by_the_kind_of_a_failure_and_not_by_its_words():
    """The words of a gradient do not make a deviation of a weight one of a gradient."""
    gradient = Failure(0, "0.weight", "its gradient is away", "", "gradient")
    base, wide = mu.Run(mlp(4)), mu.Run(mlp(8))
    plan = mu.infer_plan(base.model, wide.model)
    measured = Trial(base, wide, plan, 1e-9, identity=Identity({}, (), {}))
    assert suspect(measured, gradient).another_plan, "no gradient was measured, and none is needed"
    assert suspect(measured, replace(gradient, kind="weight")).cause == OPTIMIZER
    factors = Identity({}, (), {"0.weight": 0.5, "0.bias": 0.5})
    assert suspect(replace(measured, identity=factors), gradient).cause == CLIPPING


def test_a_pickle_of_0_2_0_is_read(certificate):
    failure = Failure(0, "loss", "differs", "unknown", "loss")
    for known in (certificate, replace(certificate, failure=failure)):
        old = copy.deepcopy(known)
        # What 0.2.0 stored is what its classes had: no modes, and failures without a kind.
        del vars(old)["modes"]
        for key in ("kind", "another_plan") if old.failure else ():
            del vars(old.failure)[key]
        read = pickle.loads(pickle.dumps(old))
        assert str(read) == str(replace(known, modes={}))
        assert read.to_json()
        assert read.modes == {}
        assert read.holds is known.holds
        assert read.failure is None or read.failure.kind == "unrecorded"
        assert replace(read, memory=1).memory == 1
        assert pickle.loads(pickle.dumps(known)) == known, "control: nothing else is filled in"

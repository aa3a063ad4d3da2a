"""A plan is a value keyed by name, so it outlives what loses attributes of tensors.

Every test transforms a model after its plan was inferred, holds the result against the plan's base end,
and grows it to the same bits as the model that was left alone.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mupscale as mu
from harness.closeness import assert_exact, assert_same_tensors, difference
from harness.refusals import refused
from harness.runs import train_on, trained
from harness.tensors import tensors_of
from harness.toys import TiedModel, loss_on, tokens
from mupscale.plans.ends import check_end
from mupscale.tensors.expand import expand

pytestmark = pytest.mark.filterwarnings(
    "ignore:mask. buffers that grow and are not in the state dict:UserWarning"
)


class Survivor(TiedModel):
    """A tied readout, and a buffer of each kind that grows with the width."""

    mean: Tensor
    mask: Tensor

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("mask", torch.ones(n), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) - self.mean
        out: Tensor = self.readout(self.norm(h + torch.tanh(self.hidden(h)) * self.mask))
        return out


@pytest.fixture(scope="module")
def plan() -> mu.Plan:
    return mu.plans.plan_between(Survivor, 8, 16, loss=loss_on(tokens()))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Survivor(8).double()
    for tensor in made.state_dict().values():
        tensor.normal_()
    return made


def make_wide() -> nn.Module:
    return Survivor(16)


def widened(model: nn.Module, plan: mu.Plan) -> nn.Module:
    return mu.grow(model, make_wide, plan=plan).model


def assert_survived(changed: nn.Module, model: nn.Module, plan: mu.Plan) -> None:
    """The plan fits what became of the model, and grows it and its state dict as it grows the model."""
    check_end(plan, changed, "base")
    wanted = widened(model, plan)
    assert_same_tensors(tensors_of(widened(changed, plan)), tensors_of(wanted))
    found = mu.trainers.grow_state_dict(changed.state_dict(), plan)
    saved = wanted.state_dict()
    assert len(found) == len(saved)
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name.removeprefix("module.").removeprefix("_orig_mod.")]), name


def test_a_changed_model_does_not_pass_for_the_same(plan, model):
    """Control: the comparison sees one entry changed, and the fit one tensor of another size."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter("hidden.weight")[0, 0] += 1e-12
    with pytest.raises(AssertionError, match=r"hidden\.weight"):
        assert_survived(changed, model, plan)
    with refused("plan.other_shape", where="embed.weight"):
        check_end(plan, Survivor(9), "base")


def test_plan_survives_deepcopy(plan, model):
    assert_survived(copy.deepcopy(model), model, plan)
    twin = copy.deepcopy(plan)
    assert (twin, twin.hash) == (plan, plan.hash)
    assert_survived(copy.deepcopy(model), model, twin)


def test_plan_survives_to_empty(plan, model):
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    check_end(plan, empty, "base")
    empty.load_state_dict(model.state_dict())
    empty.get_buffer("mask").copy_(model.get_buffer("mask"))
    assert_survived(empty, model, plan)


def test_plan_survives_assigned_state(plan, model):
    with torch.device("meta"):
        assigned = Survivor(8)
    assigned.load_state_dict(model.state_dict(), assign=True)
    assigned.register_buffer("mask", model.get_buffer("mask").clone(), persistent=False)
    assert_survived(assigned, model, plan)


@pytest.mark.parametrize(
    "grow",
    [widened, lambda model, plan: mu.trainers.grow_state_dict(model.state_dict(), plan)],
    ids=["model", "state dict"],
)
def test_torn_ties_are_refused(grow, plan, model):
    """`to_empty` and `assign=True` untie parameters; once they differ, no single tensor stands for both."""
    torn = copy.deepcopy(model)
    torn.readout.weight = nn.Parameter(torn.embed.weight.detach().clone())
    grow(torn, plan)
    with torch.no_grad():
        torn.readout.weight.add_(1)
    with refused("plan.tied_only_in_plan", where="readout.weight"):
        grow(torn, plan)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of one, met at a file of this test alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_plan_survives_fully_shard(plan, model):
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(sharded.get_submodule("hidden"), mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    check_end(plan, sharded, "base")
    gathered = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in sharded.state_dict().items()}
    assert_same_tensors(mu.trainers.grow_state_dict(gathered, plan), widened(model, plan).state_dict())
    wide = widened(model, plan)
    fully_shard(wide, mesh=mesh)
    check_end(plan, wide, "wide")
    assert mu.infer_plan(sharded, wide, declared=mu.Declared(folds={"norm.weight": "1/2"})) == plan


@pytest.mark.usefixtures("process_group")
def test_plan_survives_distributed_data_parallel(plan, model):
    parallel = DistributedDataParallel(copy.deepcopy(model))
    assert_survived(parallel, model, plan)
    base = trained(parallel, lambda m: torch.optim.AdamW(m.named_parameters(), eps=1e-3), tokens(3))
    wide = mu.grow(base, make_wide, plan=plan)
    wide = mu.Run(DistributedDataParallel(wide.model), wide.optimizers)
    check_end(plan, wide.model, "wide")
    assert_exact(difference(train_on(wide, tokens()), train_on(base, tokens())))


def test_plan_survives_compile(plan, model):
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    x = tokens()[0][0]
    assert torch.equal(compiled(x), model(x))
    assert_survived(compiled, model, plan)
    assert_exact(difference(torch.compile(widened(compiled, plan), backend="eager")(x), compiled(x)))


def test_plan_survives_export(plan, model):
    x = tokens()[0][0]
    program = torch.export.export(model, (x,))
    unlifted = program.module()
    check_end(plan, unlifted, "base")
    assert_same_tensors(
        mu.trainers.grow_state_dict(program.state_dict, plan), widened(model, plan).state_dict()
    )
    grown = mu.grow(unlifted, make_wide, plan=plan, prove=False).model
    assert_same_tensors(tensors_of(grown), tensors_of(widened(model, plan)))
    wide = torch.export.export(widened(model, plan), (x,)).module()
    check_end(plan, wide, "wide")
    assert_exact(difference(wide(x), unlifted(x)))


def test_plan_survives_functional_call(plan, model):
    """The wide module holds nothing: the widened dict is all it needs, and its gradient is r · dup(G)."""
    x, y = tokens()[0]
    parts = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    with torch.device("meta"):
        hollow = Survivor(16)
    wide = mu.trainers.grow_state_dict(parts, plan)
    check_end(plan, hollow, "wide")
    assert_exact(difference(functional_call(hollow, wide, (x,)), functional_call(model, parts, (x,))))

    def loss(tensors: dict[str, Tensor], module: nn.Module) -> Tensor:
        return F.mse_loss(functional_call(module, tensors, (x,)), y)

    small, large = grad(loss)(parts, model), grad(loss)(wide, hollow)
    for name, entry in plan.tensors.items():
        if entry.kind == "parameter":
            assert_exact(difference(large[name], expand(small[name], entry.gradient_making())))


def test_plan_survives_pickling(plan, model):
    assert_survived(pickle.loads(pickle.dumps(model)), model, plan)
    again = pickle.loads(pickle.dumps(plan))
    assert (again, again.hash) == (plan, plan.hash)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "plan": plan.to_json()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    kept = mu.Plan.from_json(loaded["plan"])
    assert kept == plan
    assert_same_tensors(mu.trainers.grow_state_dict(loaded["model"], kept), widened(model, plan).state_dict())


def test_nothing_is_written_on_tensors(plan, model):
    """Why plans survive: neither inference nor widening leaves an attribute on a parameter."""
    wide = widened(model, plan)
    assert all(vars(tensor) == {} for m in (model, wide) for tensor in m.parameters())

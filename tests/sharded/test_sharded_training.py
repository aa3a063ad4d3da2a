"""Training on shards is training: groups, clipping, init, optimizers and the certificate, on 2 and 4 real ranks."""

import copy
from collections.abc import Callable
from functools import partial
from math import inf, isnan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer, Rprop

import mupscale as mu
from harness.closeness import EXACT, largest_difference
from harness.exactness import precise_muon
from harness.launched import folder, launch
from harness.sharded_training import (
    BASE,
    DIFFERENT,
    EQUAL,
    LAYOUTS,
    LIMIT,
    TOKENS,
    WIDE,
    Net,
    Row,
    base_run,
    collectives_per_clip,
    compare,
    optimizers,
    shard,
    train_step,
    wide_run,
)
from mupscale.models.names import named_tensors
from mupscale.optimizers.sharded_steps import refused_on_shards
from mupscale.plans.ends import identity_plan
from mupscale.sharded.memory import give_memory_
from mupscale.sharded.verify import verify_sharded
from mupscale.tensors.parts import is_sharded, local_of
from mupscale.training.units.clip import grad_norm
from tests.training.test_init import DECLARED, Tied

NORMS = (2.0, 1.0, 3.0, inf)


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found.detach().clone()


def layouts() -> tuple[str, ...]:
    return LAYOUTS[dist.get_world_size()]


def small(n: int) -> nn.Module:
    """Sizes that leave ranks with nothing: 5 units and one output."""
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, 1))


def shard_small(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh)


def with_gradients(model: nn.Module, inputs: Tensor) -> nn.Module:
    out = model(inputs)
    (out - 1).square().sum().backward()
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def pairs() -> dict[str, tuple[nn.Module, nn.Module, mu.Plan]]:
    """Plain and sharded twins with the same gradients, and their plans."""
    found = {}
    for layout in layouts():
        torch.manual_seed(0)
        plain = Net(WIDE).double()
        cut = shard(copy.deepcopy(plain), layout)
        tokens = torch.arange(TOKENS)
        plan = mu.plans.plan_between(Net, BASE, WIDE, example_inputs=(torch.arange(TOKENS),))
        found[layout] = with_gradients(plain, tokens), with_gradients(cut, tokens), plan
    torch.manual_seed(0)
    uneven = small(10).double()
    inputs = torch.randn(8, 3, dtype=torch.float64)
    found["empty"] = (
        with_gradients(uneven, inputs),
        with_gradients(shard_small(copy.deepcopy(uneven)), inputs),
        mu.plans.plan_between(
            small,
            5,
            10,
            declared=mu.Declared(layouts={"2.weight": {0: 1}, "2.bias": {0: 1}, "4.weight": {1: 1}}),
        ),
    )
    return found


def clamp(model: nn.Module, since: Any, bound: float) -> None:
    """Clip by value, in a step that changes nothing else."""
    optimizer = SGD(model.parameters(), lr=0.0, foreach=False)
    mu.clip_before_step_(optimizer, since, model=model, max_value=bound)
    optimizer.step()


def clipping() -> dict[str, Any]:
    """By layout: errors of norms, of clipped and of clamped gradients; the norm's bits; what counting replicas twice gives."""
    found: dict[str, Any] = {}
    for layout, (plain, cut, plan) in pairs().items():
        wanted = {p: grad_norm(plain, plan, p=p) for p in NORMS}
        norms = {p: grad_norm(cut, plan, p=p) for p in NORMS}
        held = torch.stack(
            [local_of(p.grad).square().sum() for p in cut.parameters() if p.grad is not None]
        ).sum()
        dist.all_reduce(held)
        plainly = sum(float(g.square().sum()) for g in gradients(plain).values())
        limit = 0.1 * float(wanted[2.0])
        for model in (plain, cut):
            mu.trainers.clip_grad_norm_(model, plan, max_norm=limit)
        clipped, after = (
            largest_difference(gradients(cut), gradients(plain)),
            float(grad_norm(cut, plan) / limit),
        )
        before = gradients(plain)
        bound = 0.3 * max(float(g.abs().max()) for g in before.values())
        for model in (plain, cut):
            clamp(model, plan, bound)
        found[layout] = {
            "norms": max(abs(float(norms[p] / wanted[p]) - 1) for p in NORMS),
            "bits": [float(norms[p]).hex() for p in NORMS],
            "clipped": clipped,
            "norm after": after,
            "clamped": largest_difference(gradients(cut), gradients(plain)),
            "clamping": largest_difference(gradients(plain), before),
            "held": float(held) / plainly,
            "empty": min(local_of(p).numel() for p in cut.parameters()),
        }
    return found


def partial_sums() -> tuple[float, float, float]:
    """A gradient that ranks hold in summands next to one that all hold: errors of norm and clamp, and the naive norm's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    parts = torch.randn(dist.get_world_size(), 6, dtype=torch.float64)
    model = nn.ParameterDict({"a": torch.zeros(6).double(), "b": torch.zeros(6).double()})
    plan = mu.Run(model)
    model["a"] = nn.Parameter(distribute_tensor(model["a"].data, mesh, [Replicate()]))
    model["a"].grad = DTensor.from_local(parts[rank], mesh, [Partial()])
    model["b"].grad = parts[0].clone()
    want = torch.stack([parts.sum(0), parts[0]])
    norm = float(grad_norm(model, plan) / want.norm())
    clamp(model, plan, 0.2)
    naive = float(torch.stack([parts[rank], parts[0]]).norm() / want.norm())
    clamped = whole(model["a"].grad) - want[0].clamp(-0.2, 0.2)
    return abs(norm - 1), float(clamped.abs().max()), abs(naive - 1)


def not_a_number() -> list[float]:
    """The norms of a gradient that is not a number on one rank, and of one that is too large there."""
    found = []
    for bad in (float("nan"), inf):
        model: Any = with_gradients(shard_small(nn.Linear(3, 8)), torch.ones(1, 3))
        if dist.get_rank() == 1:
            local_of(model.weight.grad)[0, 0] = bad
        plan = mu.Run(model)
        found += [float(grad_norm(model, plan, p=p)) for p in (2.0, inf)]
    return found


def two_jobs() -> float:
    """Two jobs in one world, each on half of the ranks: the error of this job's own norm."""
    from torch.distributed.device_mesh import init_device_mesh

    both = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("job", "rank"))
    torch.manual_seed(0)
    plain = nn.Linear(3, 7).double()
    cut = shard_small(copy.deepcopy(plain), both["rank"])
    inputs = torch.ones(1, 3).double() * (1 + both.get_local_rank("job"))
    plan = identity_plan(plain)
    found = [grad_norm(with_gradients(model, inputs), plan) for model in (plain, cut)]
    return abs(float(found[1] / found[0]) - 1)


def collectives() -> int:
    return collectives_per_clip()


def init() -> dict[str, Any]:
    """Names of tensors whose bits differ from those of one process, by layout and source of sizes; and refusals."""
    plan = mu.plans.plan_between(
        Tied, 64, 128, declared=mu.Declared(folds={"norm.*": "1/2", "gain": "1/2"}, **DECLARED)
    )
    simple = mu.plans.plan_between(Net, BASE, WIDE, example_inputs=(torch.arange(TOKENS),))
    torch.manual_seed(3)
    reference, tied = Net(BASE), Tied(64)
    nn.init.normal_(tied.gain, std=0.1)
    found: dict[str, Any] = {}
    for layout in layouts():
        for what, std in (("reference", reference), ("sizes", {"*.weight": 0.3, "*.bias": 0.1})):
            want = mu.init_weights_(Net(WIDE), simple, std=std)
            with torch.device("meta"):
                cut: nn.Module = Net(WIDE)
            cut = shard(cut, layout)
            if what == "reference":
                found["meta"] = _refusal(partial(mu.init_weights_, cut, simple, std=std))
            give_memory_(cut, torch.device("cpu"))
            found[f"{layout} {what}"] = _unequal(mu.init_weights_(cut, simple, std=std), want)
    with torch.device("meta"):
        empty: nn.Module = Tied(128)
    empty = shard_small(empty)
    give_memory_(empty, torch.device("cpu"))
    found["ties"] = _unequal(
        mu.init_weights_(empty, plan, std=tied), mu.init_weights_(Tied(128), plan, std=tied)
    )
    at_home = identity_plan(reference)
    found["own sizes"] = _unequal(
        mu.init_weights_(shard(copy.deepcopy(reference), "fsdp"), at_home),
        mu.init_weights_(reference, at_home),
    )
    torch.manual_seed(dist.get_rank())
    cut = shard(Net(WIDE), "fsdp")
    found["other references"] = _refusal(lambda: mu.init_weights_(cut, simple, std=Net(BASE)))
    torch.manual_seed(0)
    weight = nn.init.normal_(cut.get_parameter("up.weight"))
    torch.manual_seed(0)
    found["control"] = torch.equal(whole(weight), nn.init.normal_(torch.empty(2 * WIDE, WIDE)))
    rows = whole(weight)
    found["repeated rows"] = len(rows) - len(rows.unique(dim=0))
    return found


def _unequal(found: nn.Module, want: nn.Module) -> list[str]:
    wanted = {name: t.detach() for name, _, t in named_tensors(want)}
    return [name for name, _, t in named_tensors(found) if not torch.equal(whole(t), wanted[name])]


def _refusal(action: Callable[[], object]) -> tuple[str, ...]:
    try:
        action()
    except mu.MupscaleError as error:
        return error.codes
    return ()


STEPPED: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 1e-2}, {}),
    "AdamW foreach": (AdamW, {"lr": 1e-2}, {"foreach": True}),
    "AdamW fused": (AdamW, {"lr": 1e-2}, {"fused": True}),
    "SGD": (SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1}, {}),
    "SGD foreach": (SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1}, {"foreach": True}),
    "Muon": (Muon, {"lr": 1e-2}, {}),
    **{
        name: (getattr(torch.optim, name), {"lr": 1e-2}, {})
        for name in ("Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD")
    },
}


def stepped(cut: bool, layout: str, name: str, in_units: bool = False) -> tuple[dict[str, Tensor], Any]:
    """The parameters after five clipped steps, and the groups that made them, in words."""
    cls, settings, options = STEPPED[name]
    torch.manual_seed(0)
    model: nn.Module = Net(WIDE).double()
    model, plan = (
        shard(model, layout) if cut else model,
        mu.plans.plan_between(Net, BASE, WIDE, example_inputs=(torch.arange(TOKENS),)),
    )
    matrices = cls is Muon
    build: Any = cls
    if in_units:
        optimizer = build(model.named_parameters(), **settings, **options)
        mu.step_in_units_(optimizer, plan, model=model)
    else:
        chosen = (lambda n, p: n in ("up.weight", "down.weight")) if matrices else None
        groups = mu.param_groups(model, plan, cls, parameters=chosen, **settings)
        optimizer = build(groups, **options)
        mu.set_lr_(optimizer, 0.5 * settings["lr"])
        assert abs(mu.diagnostics.reference_lr(optimizer) - 0.5 * settings["lr"]) < 1e-15
    mu.clip_before_step_(optimizer, plan, model=model, max_norm=LIMIT)
    for _ in range(5):
        model.zero_grad()
        with_gradients(model, torch.arange(TOKENS))
        optimizer.step()
    said = [
        (g["param_names"], {k: v for k, v in g.items() if k not in ("params", "param_names")})
        for g in optimizer.param_groups
    ]
    return {n: whole(p) for n, p in model.named_parameters()}, said


def stepping() -> dict[str, Any]:
    """By optimizer: the distance of sharded from plain training, over all layouts; groups must be the same."""
    found: dict[str, Any] = {}
    for name in STEPPED:
        with precise_muon():
            want, groups = stepped(False, "", name)
            for layout in layouts() if name.split()[0] in ("AdamW", "SGD", "Muon") else ("fsdp",):
                parameters, said = stepped(True, layout, name)
                assert said == groups
                found[name] = max(found.get(name, 0.0), largest_difference(parameters, want))
    want, _ = stepped(False, "", "AdamW foreach", in_units=True)
    for layout in (*layouts(), "tp"):
        parameters, _ = stepped(True, layout, "AdamW foreach", in_units=True)
        found["in units"] = max(found.get("in units", 0.0), largest_difference(parameters, want))
    for name in ("AdamW foreach", "AdamW fused"):  # plain tensors next to sharded ones
        found[f"{name} tp"] = largest_difference(stepped(True, "tp", name)[0], stepped(False, "", name)[0])
    found["control"] = largest_difference(want, stepped(False, "", "AdamW foreach")[0])
    return found


UNSHARDED: dict[str, tuple[type[Optimizer], dict[str, Any], tuple[int, int], str]] = {
    "Adafactor": (Adafactor, {"lr": 1e-2}, (8, 8), "optimizer.cannot_step_shards"),
    "Rprop": (Rprop, {"lr": 1e-2}, (8, 8), "optimizer.cannot_step_shards"),
    "SGD fused": (SGD, {"lr": 1e-2, "fused": True}, (8, 8), "optimizer.no_fused_shards"),
    "Adagrad fused": (Adagrad, {"lr": 1e-2, "fused": True}, (8, 8), "optimizer.no_fused_shards"),
    "Muon": (Muon, {"lr": 1e-2}, (1, 8), "optimizer.shard_too_small"),
}


def refused() -> dict[str, tuple[tuple[str, ...], str]]:
    """By optimizer: the codes of the faults that are found on shards, and what torch does when it is not asked."""
    found = {}
    for name, (cls, settings, (rows, columns), _) in UNSHARDED.items():
        plain = nn.Linear(columns, rows, bias=False)
        model = with_gradients(shard_small(copy.deepcopy(plain)), torch.ones(2, columns))
        named = dict(model.named_parameters())
        assert not refused_on_shards(cls, dict(plain.named_parameters()), settings)
        faults = refused_on_shards(cls, named, settings)
        build: Any = cls
        torchs = ""
        try:
            build(named.values(), **settings).step()
        except (RuntimeError, NotImplementedError) as error:
            torchs = type(error).__name__
        found[name] = tuple(fault.code for fault in faults), torchs
    one = shard_small(nn.Linear(8, 1, bias=False))
    groups = _refusal(lambda: mu.param_groups(one, mu.Run(one), Muon, lr=0.1))
    found["groups"] = groups, ""
    attached = _refusal(lambda: mu.step_in_units_(Muon(one.parameters(), lr=0.1), mu.Run(one)))
    found["in units"] = attached, ""
    return found


def proof() -> dict[str, Any]:
    """Certificates of a sound run and of four that are not; and whether both runs were put back."""
    plan, found = mu.plans.plan_between(Net, BASE, WIDE, example_inputs=(torch.arange(TOKENS),)), {}
    for layout in layouts():
        for wrong in ("", "groups", "clipping", "noise", "state") if layout == "fsdp" else ("",):
            base = base_run(layout, "adamw", torch.float64)
            wide = wide_run(base, plan, layout, "adamw", torch.float64)
            if wrong == "groups":
                wide = mu.Run(wide.model, optimizers(wide.model, "adamw"), plan=plan, since=plan)
            if wrong == "noise" and dist.get_rank() == 1:
                with torch.no_grad():
                    local_of(wide.model.get_parameter("up.weight"))[0, 0] += 1e-3
            if wrong == "state" and dist.get_rank() == 1:
                local_of(wide.optimizers[0].state[wide.model.get_parameter("up.weight")]["exp_avg"]).mul_(2)
            since = mu.Run(wide.model) if wrong == "clipping" else plan
            mu.clip_before_step_(wide.optimizers, since, model=wide.model, max_norm=LIMIT)
            before = [_everything(run) for run in (base, wide)]
            certificate = verify_sharded(base, wide, step=train_step, steps=3)
            after = [_everything(run) for run in (base, wide)]
            found[f"{layout} {wrong}".strip()] = {
                "holds": certificate.holds,
                "worst": certificate.worst,
                "moved": certificate.moved,
                "steps": len(certificate.base_losses),
                "cause": certificate.failure.cause if certificate.failure else "",
                "json": certificate.to_json(),
                "back": all(map(_same, before, after)),
                "control": _same(before[0], before[1]),
            }
    return found


def _everything(run: mu.Run) -> list[Any]:
    """What this rank holds of a run, in copies: weights, state, settings."""
    tensors = [local_of(t).detach().clone() for _, _, t in named_tensors(run.model)]
    for optimizer in run.optimizers:
        for own in optimizer.state.values():
            tensors += [local_of(v).clone() for v in own.values() if isinstance(v, Tensor)]
    settings = [{k: v for k, v in g.items() if k != "params"} for o in run.optimizers for g in o.param_groups]
    return [tensors, copy.deepcopy(settings)]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a[0]) == len(b[0]) and all(map(torch.equal, a[0], b[0])) and a[1] == b[1]


def training() -> list[Row]:
    """Base and wide side by side for 50 steps, from a checkpoint and live, and what a forgotten unit does."""
    found = [compare(layout, "adamw", torch.float64, folder() / layout) for layout in layouts()]
    found.append(compare("fsdp", "adamw", torch.float32, folder() / "float32"))
    found.append(compare("fsdp", "muon", torch.float64, folder() / "muon", steps=20))
    wrong = ("clipping", "groups")
    return [*found, *(compare("fsdp", "adamw", torch.float64, None, what, steps=5) for what in wrong)]


def two_dimensions() -> list[Row]:
    """Meshes of two dimensions, which two ranks cannot have: replicas of shards, and FSDP over tensor parallelism."""
    return [compare(layout, "adamw", torch.float64, folder() / layout, steps=5) for layout in layouts()[1:]]


CASES = [
    "clipping", "partial_sums", "not_a_number", "two_jobs", "collectives", "init", "stepping", "refused",
    "proof", "training",
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids="{} ranks".format)
def ranks(request):
    return launch(__name__, CASES, request.param, timeout=600)


def test_clipping_on_shards_is_clipping(ranks):
    for rank in ranks["clipping"]:
        for layout, found in rank.items():
            assert found["norms"] <= EXACT, layout
            assert found["clipped"] <= EXACT, layout
            assert found["clamped"] <= EXACT, layout
            assert found["norm after"] == pytest.approx(1, abs=1e-5), "it was clipped"
            assert found["clamping"] > 0.1, "control: the bound bites"
            assert found["bits"] == ranks["clipping"][0][layout]["bits"], "one factor for all"
            replicas = 2.0 if layout == "hsdp" else 1.0
            assert found["held"] == pytest.approx(replicas) or layout == "fsdp+tp"
    assert min(rank["empty"]["empty"] for rank in ranks["clipping"]) == 0, "a rank that holds nothing"
    if "fsdp+tp" in ranks["clipping"][0]:
        assert ranks["clipping"][0]["fsdp+tp"]["held"] > 1.1, "control: replicas counted twice"


def test_partial_sums_are_summed_first_and_plain_tensors_count_once(ranks):
    for norm, clamped, naive in ranks["partial_sums"]:
        assert norm <= EXACT
        assert clamped <= EXACT
        assert naive > 0.01, "control"


def test_every_rank_hears_of_a_gradient_that_is_not_finite(ranks):
    for found in ranks["not_a_number"]:
        assert isnan(found[0])
        assert isnan(found[1])
        assert found[2:] == [inf, inf]


def test_a_mesh_that_is_a_part_of_the_job_has_a_norm_of_its_own(ranks):
    assert max(ranks["two_jobs"]) <= EXACT


def test_one_collective_for_all_tensors(ranks):
    assert set(ranks["collectives"]) == {1}


def test_init_gives_every_rank_the_bits_of_one_process(ranks):
    for found in ranks["init"]:
        unequal = {what: names for what, names in found.items() if isinstance(names, list)}
        assert len(unequal) >= 4
        assert not any(unequal.values()), unequal
        assert not found["control"], "torch's own initialisation depends on the number of ranks"
        assert found["repeated rows"] > 0, "and gives several ranks the same rows"
        assert "init.no_memory" in found["meta"]
        assert found["other references"] == ("init.ranks_differ",)


def test_optimizers_step_shards_as_they_step_plain_tensors(ranks):
    for found in ranks["stepping"]:
        assert found.pop("control") > 1e-4, "half the rate is seen"
        assert max(found.values()) <= EXACT, found


def test_what_torch_cannot_step_on_shards_is_refused_before_it_tries(ranks):
    for found in ranks["refused"]:
        for made in ("groups", "in units"):
            assert found.pop(made)[0] == ("optimizer.shard_too_small",)
        for name, (codes, torchs) in found.items():
            assert codes == (UNSHARDED[name][-1],)
            assert torchs, f"{name}: torch has learned this; lift the refusal"


def test_the_certificate_holds_where_training_goes_on_and_nowhere_else(ranks):
    first = ranks["proof"][0]
    for rank in ranks["proof"]:
        for name, found in rank.items():
            assert found["json"] == first[name]["json"], "every rank has the same certificate"
            assert found["back"], f"{name}: both runs are where they were"
            assert not found["control"], "control: two states that differ are seen"
            assert found["holds"] == (len(name.split()) == 1), name
    for layout in (name for name in first if len(name.split()) == 1):
        assert first[layout]["worst"] <= EXACT
        assert first[layout]["moved"] > 1e-3
        assert first[layout]["steps"] == 3
    assert "unscaled" in first["fsdp groups"]["cause"]
    assert "clipping" in first["fsdp clipping"]["cause"]
    assert "noise" in first["fsdp noise"]["cause"]
    assert "the optimizer" in first["fsdp state"]["cause"]


def test_training_goes_on(ranks):
    _expect_the_base(ranks["training"][0])


@pytest.mark.nightly
def test_training_goes_on_on_one_rank():
    _expect_the_base(launch(__name__, ["training"], 1, timeout=600)["training"][0])


@pytest.mark.nightly
def test_meshes_of_two_dimensions_load_clip_and_train():
    four = launch(__name__, ["clipping", "two_dimensions"], 4, timeout=600)
    test_clipping_on_shards_is_clipping(four)
    assert {row.layout for row in four["two_dimensions"][0]} == {"hsdp", "fsdp+tp"}
    _expect_the_base(four["two_dimensions"][0])


def _expect_the_base(rows: list[Row]) -> None:
    """The base's losses, and others where a unit was forgotten."""
    for row in rows:
        if row.wrong:
            assert row.worst >= DIFFERENT, row
        else:
            assert row.worst <= EQUAL[getattr(torch, row.dtype)], row
            assert row.clipped > 1, "clipping bites at every step"

"""Copies of experts that share the tokens of their expert: every way to grow a mixture of one's own parts them, or refuses."""

import copy
import warnings
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import mupscale as mu
from harness import megatron_files
from harness.growth.experts import Mixture
from harness.refusals import refusal, refused
from mupscale.formats.megatron.grow import grow_megatron_checkpoint
from mupscale.noise import apart, resolve
from mupscale.noise.apart import DRAWS, far_apart, share_kept
from mupscale.noise.resolve import resolve_noise
from mupscale.noise.resolved import NoisePlan, ResolvedNoise
from mupscale.plans.direction import Direction
from mupscale.plans.more_experts import more_experts_plan
from mupscale.plans.wide_model import fill_model_
from mupscale.training.check import verify
from mupscale.training.grow import prove

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
X = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))


def own(experts):
    torch.manual_seed(experts)
    model = Mixture("renormalised", experts, 2)
    model.down.data.mul_(5)
    return model


def loss(model):
    return model(X.to(model.down)).sub(X[:, :3].to(model.down).sin()).square().mean()


PLAN = replace(more_experts_plan(own(4), own(8), (4, 8)), proof="loss")


def trained():
    model = own(4)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == (decay > 0)], "weight_decay": decay}
        for decay in (0.1, 0.0)
    ]
    run = mu.Run(model, torch.optim.AdamW(groups, lr=1e-2))
    for _ in range(3):
        run.optimizer.zero_grad()
        loss(model).backward()
        run.optimizer.step()
    return run


def filled(state):
    model = own(8)
    model.load_state_dict(state)
    return model


def every(folder):
    """The tensors of a directory, loaded by torch's own reader."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tree = {k: torch.zeros(e.size) for k, e in described.items() if isinstance(e, TensorStorageMetadata)}
    load(tree, checkpoint_id=folder, no_dist=True)
    return tree


def read(folder, prefix=""):
    return {name: every(folder)[prefix + name] for name in own(8).state_dict()}


def grown(base, folder, noise):
    mu.grow_checkpoint(base, folder / "wide", plan=PLAN, noise=noise)
    return folder / "wide"


def from_live(run, folder, noise):
    return mu.load_grown_(run, mu.Run(own(8)), plan=PLAN, noise=noise).model


def without_proof(run, folder, noise):
    return mu.load_grown_(run, own(8), plan=PLAN, noise=noise, prove=False).model


def from_dcp(run, folder, noise):
    save({"model": run.model.state_dict()}, checkpoint_id=folder / "base", no_dist=True)
    return mu.load_grown_(folder / "base", own(8), plan=PLAN, noise=noise).model


def lightning(run, folder, noise):
    weights = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    torch.save({"state_dict": weights, "optimizer_states": []}, folder / "base.ckpt")
    wide = torch.load(grown(folder / "base.ckpt", folder, noise))["state_dict"]
    return filled({name.removeprefix("model."): tensor for name, tensor in wide.items()})


def megatron(run, folder, noise):
    if not (folder / "base").exists():
        megatron_files.torch_dist(folder / "base", run)
    return filled(read(grown(folder / "base", folder, noise)))


def megatron_fsdp(run, folder, noise):
    if not (folder / "base").exists():
        megatron_files.fsdp_dtensor(folder / "base", run)
    grow_megatron_checkpoint(folder / "base", folder / "wide", plan=PLAN, noise=noise)
    return filled(read(folder / "wide", megatron_files.MODEL))


def state_dict(run, folder, noise):
    if noise is not None:  # it takes no noise
        return from_live(run, folder, noise)
    return filled(mu.trainers.grow_state_dict(run.model.state_dict(), PLAN))


def in_memory(run, folder, noise):
    make, options = (lambda: own(8)), dict[str, Any](plan=PLAN, loss=loss)
    return (mu.grow(run, make, **options) if noise is None else mu.upscale(run, make, noise, **options)).model


DOORS = (from_live, without_proof, from_dcp, lightning, megatron, megatron_fsdp, state_dict, in_memory)


@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_grow_parts_copies_or_refuses(door, tmp_path):
    run = trained()
    with refused("experts.equal_scores"):
        door(run, tmp_path, None)
    assert not (tmp_path / "wide").exists()
    wide = door(run, tmp_path, mu.NewUnits())
    with torch.no_grad():
        before, after = float(loss(run.model)), float(loss(wide))
        tied = float(loss(fill_model_(own(8), run.model, Direction(PLAN))))
    assert abs(after - before) < 0.02 * before
    assert abs(tied - before) > 0.05 * before, "control: what is refused moves the loss"


def test_all_ways_give_the_same_bits(tmp_path):
    run, noise = trained(), mu.NewUnits()
    expected = in_memory(run, tmp_path, noise).state_dict()
    for door in DOORS[:-2]:
        (folder := tmp_path / door.__name__).mkdir()
        found = door(run, folder, noise).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), door.__name__


SILENT = (
    mu.SignalNoise(0.0),
    mu.MupNoise(0.0),
    mu.PairedNoise(1.0),
    mu.SignalNoise({"router.*": 0.0, "*": 0.1}),
    mu.SignalNoise({"up": 0.1}),
)


@pytest.mark.parametrize("noise", SILENT, ids=str)
def test_noise_that_leaves_the_router_alone_is_refused(noise):
    run = trained()
    for prove_it in (True, False):
        with refused("experts.equal_scores", where="router.weight"):
            mu.upscale(run, lambda: own(8), noise, plan=PLAN, loss=loss, prove=prove_it)
    with refused("experts.equal_scores", where="router.weight"):
        from_live(run, None, noise)
    mu.upscale(run, lambda: own(8), mu.SignalNoise(0.1), plan=PLAN, loss=loss)  # control


@pytest.mark.parametrize(
    "noise", [mu.SignalNoise(1e-9), mu.MupNoise(1e-9), mu.SignalNoise(0.001), mu.SplitNoise()], ids=str
)
def test_the_router_parts_copies_whatever_noise_its_experts_get(noise):
    """Control: with the noise itself in the router, copies tie and the loss moves."""
    run = trained()
    wide = from_live(run, None, noise)
    assert (share_kept(PLAN, run.model, wide, loss) or 0) > 0.95
    assert float(loss(wide)) == pytest.approx(float(loss(run.model)), rel=0.02)
    tied: Any = fill_model_(own(8), run.model, Direction(PLAN))
    tied.router.weight.data.mul_(1 + 1e-9 * torch.randn(tied.router.weight.shape))
    assert (share_kept(PLAN, run.model, tied, loss) or 0) < 0.5


def test_noise_that_is_paired_over_a_wider_router_parts_its_copies_too(monkeypatch):
    """Control: where paired noise goes into the router itself, copies tie, and no token keeps its experts."""
    run = trained()
    make = lambda: Mixture("renormalised", 4, 2, width=24)  # noqa: E731
    wider = mu.infer_plan(run.model, make, loss=loss, by="copies")
    both = Mixture("renormalised", 8, 2, width=24)
    plan = wider.then(replace(more_experts_plan(make(), both, (4, 8)), proof="loss"))
    wide = mu.load_grown_(run, both, plan=plan, noise=mu.PairedNoise(0.01)).model
    assert (share_kept(plan, run.model, wide, loss) or 0) > 0.9
    monkeypatch.setattr(resolve, "scores_experts", lambda name, entry: False)
    monkeypatch.setattr(resolve, "refuse_unparted", lambda found, plan: None)
    noise = resolve_noise(run.model.state_dict(), mu.PairedNoise(0.01), plan=plan)
    tied = fill_model_(copy.deepcopy(both), run.model, Direction(plan, noise=noise))
    assert share_kept(plan, run.model, tied, loss) == 0


def test_experts_for_all_tokens_and_for_few_do_not_compose():
    """Control: more experts for few tokens, twice, are one plan."""
    twice = replace(
        mu.infer_plan(own(4), lambda: Mixture("renormalised", 8, 4), loss=loss, by="copies"), proof="loss"
    )
    large = Mixture("renormalised", 16, 4)
    later = replace(more_experts_plan(Mixture("renormalised", 8, 4), large, (8, 16)), proof="loss")
    assert twice.then(later).proof == "none"
    with refused("proof.missing"):
        mu.load_grown_(trained(), large, plan=twice.then(later), noise=mu.NewUnits())
    again = replace(more_experts_plan(own(8), own(16), (8, 16)), proof="loss")
    assert PLAN.then(again).proof == "loss"


def test_noise_that_is_added_later_leaves_routers_that_have_parted():
    wide = mu.upscale(trained(), lambda: own(8), plan=PLAN, loss=loss)
    noisy = mu.add_noise(wide, mu.SignalNoise(0.01)).model.state_dict()
    same = {name: torch.equal(tensor, noisy[name]) for name, tensor in wide.model.state_dict().items()}
    assert same["router.weight"]
    assert not same["up"]


def test_noise_of_another_plan_and_a_frozen_router_are_refused():
    run = trained()
    for plan in (NoisePlan({}), NoisePlan({"router.weight": ResolvedNoise(0.5, apart=0)})):
        with refused("experts.equal_scores"):
            from_live(run, None, plan)
    run.model.router.requires_grad_(requires_grad=False)
    with refused("experts.equal_scores", where="router.weight"):
        mu.upscale(run.model, lambda: own(8), plan=PLAN, loss=loss)


class Dropped(Mixture):
    """A mixture whose router reads what dropout left."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.3, self.training))


def test_dropout_moves_no_token():
    """Control: with other random numbers for each model most tokens move."""
    torch.manual_seed(0)
    base: Any = Dropped("renormalised", 4, 2).train()
    make = lambda: Dropped("renormalised", 8, 2)  # noqa: E731
    with warnings.catch_warnings(action="ignore"):
        wide = mu.upscale(base, make, plan=PLAN, loss=loss)
    assert wide.provenance["loss"]["kept"] > 0.9

    def kept(call):
        return share_kept(PLAN, base, wide.model.train(), call)

    def drawn(model):
        torch.seed()
        return loss(model)

    state = torch.get_rng_state()
    assert kept(loss) > 0.9 > 0.7 > kept(drawn)
    torch.set_rng_state(state)


class Scaled(Mixture):
    """A mixture that grows by another rule than its plan: its outputs depend on how many experts there are."""

    def forward(self, x):
        return super().forward(x) * (1 + self.router.out_features / 1000)


class Sorted(Scaled):
    """The same with a router that chooses by `sort`, so that nobody sees what it chose."""

    def forward(self, x):
        with patch.object(torch.Tensor, "topk", sort_top):
            return super().forward(x)


def sort_top(scores, count, dim):
    return SimpleNamespace(indices=scores.sort(dim, descending=True).indices[..., :count])


def seeded(kind, experts):
    torch.manual_seed(experts)
    return kind("renormalised", experts, 2)


@pytest.mark.parametrize(
    ("kind", "far", "tried"), [(Scaled, 1e5, 1), (Scaled, 3.0, DRAWS), (Sorted, 1e5, DRAWS)]
)
def test_other_vectors_are_tried_only_where_a_token_may_lie_between_copies(monkeypatch, kind, far, tried):
    """A growth that is wrong fails at once where every token is seen to keep its experts.

    Controls: where vectors are short, tokens lie between copies, and where nobody sees the choice, they may. All are tried.
    """
    monkeypatch.setattr(apart, "_FAR", far)
    drawn: list[int] = []

    def recording(plan, base, draw=0):
        drawn.append(draw)
        return far_apart(plan, base, draw)

    for module in (prove, verify):
        monkeypatch.setattr(module, "far_apart", recording)
    with refused("proof.run_deviates"):
        mu.upscale(seeded(kind, 4), lambda: seeded(kind, 8), plan=PLAN, loss=loss)
    assert {*drawn} == {*range(tried)}
    drawn.clear()
    assert not mu.verify(seeded(kind, 4), lambda: seeded(kind, 8), plan=PLAN, loss=loss)
    assert {*drawn} == {*range(tried)}


class Shifted(Mixture):
    """A mixture whose experts have a bias, stacked beside their weights."""

    def __init__(self, experts, name):
        super().__init__("renormalised", experts, 2)
        self.name = name
        self.register_parameter(name, torch.nn.Parameter(0.1 * torch.randn(experts, 12)))

    def forward(self, x):
        stream = self.embed(x)
        scores = self.router(stream).softmax(-1)
        chosen = scores.topk(self.top_k, -1).indices
        values = scores.gather(-1, chosen)
        weights = torch.zeros_like(scores).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
        each = torch.einsum("nef,edf->ned", torch.einsum("nd,efd->nef", stream, self.up).relu(), self.down)
        return self.readout(stream + ((each + getattr(self, self.name)) * weights[..., None]).sum(1))


def test_a_bias_of_experts_that_may_be_their_router_is_refused():
    """Control: what the remedy says is right, and the bias gets no vectors that part copies."""
    torch.manual_seed(0)
    with refused("experts.bias_or_router", where="shift"):
        more_experts_plan(Shifted(4, "shift"), Shifted(8, "shift"), (4, 8))
    base, make = Shifted(4, "shift_bias"), lambda: Shifted(8, "shift_bias")
    plan = more_experts_plan(base, make(), (4, 8))
    wide = mu.upscale(base, make, plan=plan, loss=loss)
    assert wide.provenance["loss"]["kept"] > 0.9
    shift = wide.model.get_parameter("shift_bias")
    assert torch.equal(shift[::2], shift[1::2])


def stacked(experts, *places, router):
    """A model with stacked experts in some places, each with a matrix beside them, and a router of its own."""
    model = torch.nn.Module()
    for place in places:
        module = held(model, place)
        module.up = torch.nn.Parameter(torch.randn(experts, 3, 5))
        module.b1 = torch.nn.Parameter(torch.randn(experts, 3))
    if router:
        held(model, router).weight = torch.nn.Parameter(torch.randn(experts, 5))
    return model


def held(model, place):
    for name in place.split("."):
        if not hasattr(model, name):
            model.add_module(name, torch.nn.Module())
        model = getattr(model, name)
    return model


@pytest.mark.parametrize(
    ("places", "router"),
    [
        (["moe.experts.bank"], "moe.gate"),
        (["moe.experts.up", "moe.experts.down"], "moe.gate"),
        (["layers.0.moe.experts.bank", "layers.1.moe.experts.bank"], "layers.0.moe.gate"),
        (["up", "down"], "gate"),
        (["experts"], "routing.gate"),
    ],
)
def test_a_router_further_up_makes_a_matrix_beside_the_experts_unclear(places, router):
    """Control: alone it is the router."""
    with refused("experts.bias_or_router", where=f"{places[0]}.b1"):
        more_experts_plan(stacked(4, *places, router=router), stacked(8, *places, router=router), (4, 8))
    more_experts_plan(stacked(4, *places, router=None), stacked(8, *places, router=None), (4, 8))


def test_the_router_of_another_mixture_makes_nothing_unclear():
    """Control: a router next to the experts does."""

    def model(experts, router):
        made = stacked(experts, "experts", router=router)
        held(made, "layers.0.moe.experts").up = torch.nn.Parameter(torch.randn(experts, 3, 5))
        return made

    plan = more_experts_plan(model(4, "layers.0.moe.gate"), model(8, "layers.0.moe.gate"), (4, 8))
    assert plan["experts.b1"].chosen == 0
    with refused("experts.bias_or_router", where="experts.b1"):
        more_experts_plan(model(4, "gate"), model(8, "gate"), (4, 8))


def test_a_model_too_large_for_float64_is_measured_by_verify(monkeypatch):
    monkeypatch.setattr(prove, "FLOAT64_BYTES", 2**10)
    run, make = trained(), lambda: own(8)
    plan = replace(PLAN, proof="none")
    error = refusal(lambda: mu.upscale(run, make, plan=plan, loss=loss), "experts.too_large_to_measure")
    assert "mu.verify(base, wide, plan=plan, loss=loss)" in error.faults[0].remedy
    mu.verify(run, make, plan=plan, loss=loss).raise_if_broken()
    wide = mu.upscale(run, make, plan=plan, loss=loss, prove=False)
    assert 0.9 < wide.provenance["loss"]["kept"] <= 1


def test_checkpoints_of_megatron_have_the_bits_and_moments_of_both_kinds_of_growth(tmp_path):
    """Control: another seed."""
    run = trained()
    twice = mu.infer_plan(run.model, lambda: Mixture("renormalised", 8, 4), loss=loss, by="units")
    write: dict[str, Any] = {
        "torch_dist": megatron_files.torch_dist,
        "fsdp_dtensor": megatron_files.fsdp_dtensor,
    }
    for (name, plan), (kind, files) in product({"apart": PLAN, "twice": twice}.items(), write.items()):
        base, out = files(tmp_path / f"{name} {kind}", run), tmp_path / f"{name} {kind} wide"
        grow_megatron_checkpoint(base, out, plan=plan, noise=mu.NewUnits(), seed=3)
        same, other = (mu.upscale(run, lambda: own(8), plan=plan, seed=seed) for seed in (3, 4))
        fsdp = kind == "fsdp_dtensor"
        found = read(out, megatron_files.MODEL if fsdp else "")
        for parameter, value in same.model.named_parameters():
            assert torch.equal(found[parameter], value), (name, kind, parameter)
        for moment in megatron_files.MOMENTS:
            stored = every(out)
            for parameter, value in same.model.named_parameters():
                key = (
                    f"{megatron_files.STATE}{parameter}.{moment}"
                    if fsdp
                    else f"optimizer.state.{moment}.{parameter}"
                )
                assert torch.equal(stored[key], same.optimizer.state[value][moment]), (name, kind, key)
        changed = "router.weight" if name == "apart" else "down"
        assert not torch.equal(found[changed], other.model.get_parameter(changed)), name

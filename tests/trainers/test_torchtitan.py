"""A wide torchtitan job continues from a narrow checkpoint; its plans are proven, and what is in doubt is refused.

Most of it runs without torchtitan, on modules and configs that are spelled as torchtitan spells them.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness import torchtitan_jobs as jobs
from harness.refusals import refused
from harness.torchtitan_jobs import END, LATER, STOP, Setup, gap
from mupscale.proofs.identity import gradient_identity
from mupscale.trainers import torchtitan
from mupscale.trainers.titan_layouts import titan_plan
from mupscale.trainers.torchtitan import Growing
from mupscale.training.units.clip import grad_norm

SIZE, TOKENS = 4, 11
EQUAL, DIFFERENT = 1e-5, 1e-3


class Attention(nn.Module):
    """Grouped queries as torchtitan writes them: one projection by key-value head, or three."""

    def __init__(self, dim: int, heads: int, kv: int, fused: bool, bias: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv, SIZE
        self.qkv_linear = nn.Module()
        group = heads // kv
        parts = {"wqkv": kv * (group + 2)} if fused else {"wq": heads, "wk": kv, "wv": kv}
        for name, rows in parts.items():
            setattr(self.qkv_linear, name, nn.Linear(dim, rows * SIZE, bias=bias))
        self.wo = nn.Linear(heads * SIZE, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        linear: Any = self.qkv_linear
        if hasattr(linear, "wqkv"):
            group = self.n_heads // self.n_kv_heads
            split = linear.wqkv(x).view(rows, length, self.n_kv_heads, group + 2, SIZE)
            q, k, v = (part.flatten(2, 3) for part in split.split([group, 1, 1], dim=3))
        else:
            q, k, v = (part(x).view(rows, length, -1, SIZE) for part in (linear.wq, linear.wk, linear.wv))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class Decoder(nn.Module):
    def __init__(self, config: "Config") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(TOKENS, config.dim)
        self.attention = Attention(config.dim, config.heads, config.kv, config.fused, config.bias)
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, TOKENS, bias=False)
        if config.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        out: torch.Tensor = self.lm_head(self.norm(x + self.attention(x)))
        return out


@dataclass
class Config:
    dim: int = 8
    heads: int = 4
    kv: int = 2
    fused: bool = True
    bias: bool = False
    enable_weight_tying: bool = False

    def build(self) -> Decoder:
        return Decoder(self)

    def update_from_config(self, config: Any) -> None:
        """torchtitan writes the job's sequence length into it."""


def wide(k: int = 2, **changes: Any) -> Config:
    return Config(dim=8 * k, heads=4 * k, kv=2 * k, **changes)


def loss(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) % TOKENS
    return F.cross_entropy(model(tokens).flatten(0, 1), (3 * tokens % TOKENS).flatten())


KINDS = [{}, {"fused": False}, {"bias": True}, {"fused": False, "bias": True}, {"enable_weight_tying": True}]


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_the_layouts_read_off_are_those_the_gradient_identity_proves(changes):
    found = titan_plan(Config(**changes), wide(**changes))
    proven = mu.plans.plan_between(
        lambda config: config.build(), Config(**changes), wide(**changes), loss=loss
    )
    assert found == proven


def test_a_layout_by_heads_is_another_plan():
    """Control: queries duplicated head by head, the nearest wrong layout."""
    unfused = {"fused": False}
    name = "attention.qkv_linear.wq.weight"
    right, wrong = (
        titan_plan(Config(**unfused), wide(**unfused), declared=mu.Declared(layouts=layouts or {}))
        for layouts in (None, {name: {0: SIZE, 1: 1}})
    )
    assert right[name].axes != wrong[name].axes
    base = Config(**unfused).build().double()
    errors = []
    for plan in (right, wrong):
        grown: Any = mu.grow(base, wide(**unfused).build, plan=plan, prove=False).model
        errors.append(gradient_identity(base, grown, plan=plan, loss=loss).worst[1])
    assert errors[0] < 1e-12
    assert errors[1] > 1e-2


def test_a_small_pair_proves_a_plan_and_refuses_a_wrong_declaration():
    pair = (Config(), wide())
    assert titan_plan(wide(2), wide(4)).proof == "none"
    assert titan_plan(wide(2), wide(4), small=pair).proof == "copy"
    with refused("search.no_exact_plan"):
        titan_plan(
            wide(2), wide(4), small=pair, declared=mu.Declared(layouts={"attention.wo.weight": {0: 1, 1: 1}})
        )


def test_a_manager_without_a_proof_is_refused_unless_it_is_asked_to_go_without():
    with refused("proof.missing"):
        made(small=None)
    assert not made(small=None, prove=False)[0].plan.proved


def test_heads_that_change_size_or_grouping_are_refused():
    with refused("layout.heads_differ", where="attention"):
        titan_plan(Config(), Config(dim=16, heads=8, kv=2))


class Stock:
    """What the manager takes from torchtitan's own."""

    def __init__(self, config: Any, *, states: dict[str, Any], **parts: Any) -> None:
        self.states, self.initial_load_path = states, config.initial_load_path
        self.loaded: list[str] = []

    def dcp_load(self, state_dict: Any, checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        self.loaded.append(checkpoint_id)


class Manager(Growing, Stock):
    pass


@dataclass
class Training:
    max_norm: float


def made(**changes: Any) -> tuple[Any, Any, list[float]]:
    """A manager next to a trainer that has built everything else, and the norms that trainer logs."""
    torch.manual_seed(0)
    k = changes.get("k", 2)
    model, norms = wide(k).build(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = SimpleNamespace(
        config=SimpleNamespace(training=Training(changes.get("max_norm", 0.1))),
        model_config=wide(k),
        parallel_dims=SimpleNamespace(pp_enabled=changes.get("stages", 1) > 1),
        metrics_processor=SimpleNamespace(log=lambda step, mean, most, norm, **_: norms.append(norm)),
    )
    usual: dict[str, Any] = {
        "enable": True,
        "base": SimpleNamespace(model=Config()),
        "reference": None,
        "declared": None,
        "prove": True,
    }
    usual["small"] = (SimpleNamespace(model=Config()), SimpleNamespace(model=wide()))
    config = SimpleNamespace(**{**usual, "initial_load_path": "/narrow", **changes})
    states = {"train_state": trainer}
    return Manager(config, model_parts=[model], optimizers=[optimizer], states=states), trainer, norms


def test_units_clipping_and_the_logged_norm_are_taken_over():
    manager, trainer, norms = made()
    model, optimizer = manager._model, manager._optimizers[0]
    loss(model).backward()
    expected = float(grad_norm(model, manager.plan))
    plain = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    before = model.attention.wo.weight.detach().clone()
    optimizer.step()
    trainer.metrics_processor.log(1, 0.0, 0.0, plain)
    assert norms == [pytest.approx(expected)]
    assert expected > 0.1
    assert abs(plain / expected - 1) > 0.05
    moved = float((model.attention.wo.weight.detach() - before).abs().max())
    assert moved == pytest.approx(1e-2 / 2, rel=1e-2)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert trainer.config.training.max_norm == math.inf


def test_a_trainer_that_does_not_clip_logs_its_own_norm():
    manager, trainer, norms = made(max_norm=math.inf)
    assert not manager.clipping
    trainer.metrics_processor.log(1, 0.0, 0.0, 7.0)
    assert norms == [7.0]


def test_a_base_that_was_grown_keeps_its_reference():
    specs = {"reference": SimpleNamespace(model=Config()), "base": SimpleNamespace(model=wide())}
    manager, *_ = made(k=4, **specs)
    assert manager.plan == titan_plan(wide(), wide(4))
    assert manager.since == titan_plan(Config(), wide(4)) != manager.plan


def test_checkpoints_of_the_wide_job_load_as_ever():
    manager, *_ = made()
    manager.dcp_load({}, "/wide/step-20", False, False)
    assert manager.loaded == ["/wide/step-20"]


def test_a_checkpoint_says_how_it_was_grown_and_another_plan_does_not_resume_it():
    manager, *_ = made()
    told = manager.states["mupscale"].state_dict()
    assert mu.Plan.from_json(told["plan"]) == manager.plan
    manager.states["mupscale"].load_state_dict(told)
    other = mu.infer_plan(nn.Linear(2, 2), nn.Linear(2, 2))
    with refused("growth.other_plan"):
        torchtitan._Plans(other, other).load_state_dict(told)


def test_what_it_cannot_follow_is_refused_at_once():
    codes = ("torchtitan.loading_disabled", "torchtitan.base_not_given", "torchtitan.pipeline_stages")
    with refused(*codes, where=("checkpoint.enable", "checkpoint.base", "pipeline_parallel_degree")):
        made(enable=False, base=None, stages=2)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", [{}, {"fused": False}, {"tied": True}], ids=str)
def test_plans_of_real_configs_are_proven(changes):
    pytest.importorskip("torchtitan")
    jobs.on_cpu()
    configs = [jobs.model_config(k, **changes) for k in (1, jobs.K)]
    tokens = torch.arange(32).view(2, 16) * 7 % jobs.TOKENS

    def real_loss(model: Any) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), (5 * tokens % jobs.TOKENS).flatten())

    def build(config: Any) -> Any:
        model = config.build()
        if not next(model.parameters()).is_meta:
            with torch.no_grad():
                model.init_weights()
        return model

    assert titan_plan(*configs) == mu.plans.plan_between(build, *configs, loss=real_loss)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_the_wide_job_goes_on_like_the_base():
    """Controls: plain units, and the plain norm."""
    pytest.importorskip("torchtitan")
    curves = jobs.measure_jobs(("base", "wide", "plain_units", "plain_norm", "resumed"), Setup())
    base, wide, resumed = curves["base"], curves["wide"], curves["resumed"]
    assert (len(wide), len(resumed)) == (END - STOP, END - LATER)
    assert max(gap(base, wide), gap(base, wide, 1)) < EQUAL
    assert min(gap(base, curves["plain_units"]), gap(base, curves["plain_norm"])) > DIFFERENT
    assert gap(wide, resumed) == 0


PAIR = (("base", "wide", END - STOP),)
STARTS = (
    ("base", "again", END - LATER),
    ("base_weights", "wide_weights", END),
    ("base_weights", "wide_files", END),
)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("setup", "pairs"),
    [
        (Setup(tensor_parallel=2), PAIR),
        (Setup(world=4, tensor_parallel=2), PAIR),
        (Setup(backend="full_dtensor"), PAIR),
        (Setup(fused=False), PAIR),
        (Setup(), STARTS),
    ],
    ids=["tensor parallel", "FSDP and tensor parallel", "full_dtensor", "separate projections", "starts"],
)
def test_other_shardings_models_and_starts_go_on_too(setup, pairs):
    """Grown again from the wide job's own checkpoint; weights only, from DCP and from safetensors."""
    pytest.importorskip("torchtitan")
    asked = {job for one, other, _ in pairs for job in (one, other)}
    if pairs is STARTS:
        asked |= {"wide", "base_files"}
    curves = jobs.measure_jobs([job for job in jobs.JOBS if job in asked], setup)
    for one, other, steps in pairs:
        assert len(curves[other]) == steps
        assert max(gap(curves[one], curves[other]), gap(curves[one], curves[other], 1)) < EQUAL, other

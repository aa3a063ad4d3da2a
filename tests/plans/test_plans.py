"""Plans as values: their text, JSON and hash; names, folds, and the search that only exact layouts pass."""

import copy
import json
import pickle
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mupscale as mu
from harness.closeness import EXACT, assert_bitwise, assert_close
from harness.draws import data, seeded
from harness.oracle import identity_error
from harness.refusals import refused
from harness.runs import drift, gradients, train


def mlp(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def loss(model: Any) -> Any:
    return (model(data(6, 3)) - data(6, 2)).square().mean()


# Text, JSON, hash


def test_explain_says_what_happens_to_one_tensor():
    plan = mu.plans.plan_between(mlp, 4, 8).fold("2.weight", "2^(1/2)")
    text = plan.explain("2.weight")
    for line in (
        "2.weight: matrix-like, 4x4 -> 8x8",
        "axis 0    out: 4x2",
        "axis 1    in: 4x2",
        "fold      2^(1/2)",
        "weight    s = 2^(-1/2)",
        "copies    c = 4",
        "gradient  r = 1/(s c) = 2^(-3/2)",
        "AdamW     lr x 2^(-1/2), weight_decay x 2^(1/2), eps x 2^(-3/2)",
        "SGD       lr x 2, weight_decay x 1/2",
    ):
        assert line in text, f"{line!r} is not in\n{text}"
    assert "scalar-like" in plan.explain("4.bias")
    assert "readout" in plan.explain("4.weight")
    assert plan.explain("_orig_mod.2.weight") == text, "wrapper prefixes do not matter"


def test_the_table_shows_equal_layers_once_and_ends_with_the_hash():
    def make(n: int) -> Any:
        return nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Linear(n, n) for _ in range(12)), "norm": nn.RMSNorm(n, 0.1)}
        )

    plan = mu.plans.plan_between(make, 4, 8)
    rows = [line.split() for line in str(plan).splitlines()]
    assert rows[0] == ["tensor", "kind", "shape", "axes", "that", "grow", "s", "c", "r", "n"]
    assert sum(row[0] == "layers.*.weight" for row in rows) == 1
    assert next(row for row in rows if row[0] == "layers.*.weight")[-1] == "12"
    assert str(plan).splitlines()[-1] == f"proof: none   hash: {plan.hash[:16]}"


def test_the_hash_of_a_tiny_plan_never_changes():
    """A golden value: plans are written into checkpoints, so their identity outlives this version."""
    axes = (mu.rules.Axis.parse("out: 2x2 * 3"), mu.rules.Axis.parse("in: 4x3+2"))
    plan = mu.Plan({"w": mu.plans.TensorPlan(("w",), axes, mu.rules.Scale.of("2^(1/2)"))}, ties={"v": "w"})
    assert plan.hash == "18d7be7812740fcb7c2010f9c4bfb23955f74deb9016dec5657a6595792f766a"
    assert plan.hash != mu.Plan(plan.tensors).hash, "control: ties are part of it"


def test_plans_survive_json_copies_and_pickles():
    plan = mu.plans.plan_between(mlp, 4, 9, by="padded").fold("0.*", "3^(-1/4)")
    for other in (mu.Plan.from_json(plan.to_json()), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert (other.hash, hash(other)) == (plan.hash, hash(plan))
    assert plan != plan.fold("0.bias", 2)
    assert plan.fold("0.bias", 2).fold("0.bias", "1/2").hash == plan.hash


def test_a_plan_of_an_older_version_that_edits_constants_is_refused_by_name():
    """Its remedy, a new plan, is proved in test_wide_model.py."""
    stored = json.loads(mu.plans.plan_between(mlp, 4, 9, by="padded").to_json())
    assert stored["edits"] == [], "control: the hashes of all other plans stay"
    with refused("plan.edits_constants", where=["norm.eps"]):
        mu.Plan.from_json(json.dumps({**stored, "edits": [["norm.eps", 1e-05, "8/9"]]}))
    for wrong in ("norm.eps", [1], [[1, 2, 3]]):
        with refused("plan.malformed_record"):
            mu.Plan.from_json(json.dumps({**stored, "edits": wrong}))


def test_a_plan_of_an_older_version_that_keeps_outputs_alone_is_refused_by_name():
    plan = mu.plans.plan_between(mlp, 4, 8)
    stored = json.loads(plan.to_json())
    assert stored["exact"] == "dynamic", "control: it is part of every hash"
    for wrong in ("static", "", None):
        with refused("plan.static"):
            mu.Plan.from_json(json.dumps({**stored, "exact": wrong}))
    other = mu.Plan.__new__(mu.Plan)
    other.__setstate__({**plan.__dict__, "exact": "dynamic"})
    assert other == plan
    with refused("plan.static"):
        other.__setstate__({**plan.__dict__, "exact": "static"})


# Names


def test_a_name_map_renames_both_ends_and_can_be_undone():
    plan = mu.plans.plan_between(mlp, 4, 8)
    names = {"0.weight": "first.kernel", "2.weight": "second.kernel"}
    renamed = plan.rename(names)
    assert renamed["first.kernel"].sources == ("first.kernel",)
    assert renamed.rename({new: old for old, new in names.items()}) == plan
    assert renamed.hash != plan.hash
    state = {names.get(k, k): v for k, v in seeded(mlp, 4).state_dict().items()}
    wide = mu.trainers.grow_state_dict(state, renamed)
    assert_bitwise(
        wide["second.kernel"], mu.trainers.grow_state_dict(seeded(mlp, 4).state_dict(), plan)["2.weight"]
    )


def wrapped(kind: str, model: Any) -> Any:
    if kind == "compile":
        return torch.compile(model, backend="eager")
    if kind == "checkpoint":
        model[2] = checkpoint_wrapper(model[2])
        return model
    return nn.DataParallel(model) if kind == "DataParallel" else torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.parametrize("kind", ["compile", "checkpoint", "DataParallel", "AveragedModel"])
def test_wrappers_do_not_matter(kind):
    plan = mu.plans.plan_between(mlp, 4, 8)
    base = wrapped(kind, seeded(mlp, 4))
    run = mu.Run(base, torch.optim.SGD(base.parameters(), lr=0.1, momentum=0.9))
    train(run, loss, 2)
    wide = mu.grow(run, lambda: wrapped(kind, mlp(8)), plan=plan)
    assert drift(run, wide, loss, 5) <= EXACT
    assert mu.infer_plan(wrapped(kind, mlp(4)), wrapped(kind, mlp(8))) == plan
    state = {key: value for key, value in base.state_dict().items() if key != "n_averaged"}
    assert mu.trainers.grow_state_dict(state, plan).keys() == wide.model.state_dict().keys() - {"n_averaged"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_keys_of_state_dicts_keep_their_prefix(prefix):
    plan, state = mu.plans.plan_between(mlp, 4, 8), seeded(mlp, 4).state_dict()
    plain = mu.trainers.grow_state_dict(state, plan)
    found = mu.trainers.grow_state_dict({prefix + key: value for key, value in state.items()}, plan)
    assert found.keys() == {prefix + key for key in plain}
    assert all(torch.equal(found[prefix + key], value) for key, value in plain.items())


# Folds


class Multiplied(nn.Module):
    """A hidden layer whose weight is multiplied by a constant of the code."""

    def __init__(self, n: int, multiplier: float):
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(3, n), nn.Linear(n, n), nn.Linear(n, 2)
        self.multiplier = multiplier

    def forward(self, x):
        h = F.linear(self.inner(x).tanh(), self.multiplier * self.middle.weight, self.middle.bias)
        return self.head(h.tanh())


@pytest.mark.filterwarnings("ignore:training changes by")  # the multiplier, which no proof is asked about
@pytest.mark.parametrize("theta", ["4", "3/2", "2^(1/2)"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_symmetry_theta_moves_a_multiplier_between_code_and_weight(kind, theta):
    """(A, W, lr, eps, decay) and (Aθ, W/θ, …) train the same function: the fold 1/θ holds the rest."""
    number = float(mu.rules.Scale.of(theta))
    model = seeded(Multiplied, 4, 1.0)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-2}
    run = mu.Run(model, kind(model.parameters(), lr=1e-2, weight_decay=0.1, **settings))
    train(run, loss, 3)
    for wide in (4, 8):
        plan = mu.plans.plan_between(lambda size: Multiplied(*size), (4, 1.0), (wide, number))
        make = partial(Multiplied, wide, number)
        exact = mu.grow(
            run, make, plan=plan.fold("middle.weight", mu.rules.Scale.of(theta) ** -1), prove=False
        )
        forgotten = mu.grow(run, make, plan=plan, prove=False)
        base = mu.grow(run, lambda: Multiplied(4, 1.0), plan=mu.infer_plan(model, model), prove=False)
        assert drift(base, exact, loss, 10) <= EXACT
        assert drift(base, forgotten, loss, 1) > 1e-6, "control: without the fold it is another function"


def test_a_fold_accepts_exact_numbers_and_patterns():
    plan = mu.plans.plan_between(mlp, 4, 8)
    for factor in ("1/2", Fraction(1, 2), 0.5, mu.rules.Scale.of("1/2")):
        assert plan.fold("*.bias", factor) == plan.fold("*.bias", "1/2")
    folded = plan.fold("*.bias", "1/2")
    assert [n for n in plan.tensors if folded[n] != plan[n]] == ["0.bias", "2.bias", "4.bias"]
    assert folded["0.bias"].change.s == mu.rules.Scale.of("1/2")
    assert (folded["0.bias"].change.s * folded["0.bias"].change.r * mu.rules.Scale.of(2)).is_one


# Search


class Attention(nn.Module):
    """Grouped or fused attention without positions. `layout` says how fused rows are read."""

    def __init__(self, size: tuple[int, int], layout: str, d: int = 3):
        super().__init__()
        self.width, self.num_heads = size
        self.head_dim, self.layout = d, layout
        self.embed, self.head = nn.Linear(3, self.width), nn.Linear(self.width, 2)
        rows = self.num_heads * d
        if layout == "grouped":
            self.num_kv_heads = self.num_heads // 2
            self.q, self.k, self.v = (nn.Linear(self.width, n) for n in (rows, rows // 2, rows // 2))
        else:
            self.qkv = nn.Linear(self.width, 3 * rows)
        self.o = nn.Linear(rows, self.width)

    def forward(self, x):
        h = self.embed(x)
        b, t = h.shape[:2]
        if self.layout == "grouped":
            q, k, v = (f(h).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        elif self.layout == "3HD":
            q, k, v = self.qkv(h).view(b, t, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = self.qkv(h).view(b, t, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        return self.head(h + self.o(mixed))


def attention_loss(model: Any) -> Any:
    return (model(data(4, 5, 3)) - data(4, 5, 2)).square().mean()


LAYOUTS = {
    "grouped": {"q.weight": "out: 2x3 * 6", "k.weight": "out: 2x3 * 3", "o.weight": "in: 2x3 * 6"},
    "3HD": {"qkv.weight": "out: 12x3 * 3", "o.weight": "in: 4x3 * 3"},
    "H3D": {"qkv.weight": "out: 4x3 * 9", "o.weight": "in: 4x3 * 3"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_search_finds_how_heads_are_laid_out(layout):
    def make(size: Any) -> Any:
        return Attention(size, layout)

    plan = mu.plans.plan_between(make, (4, 4), (8, 12), loss=attention_loss)
    for name, axis in LAYOUTS[layout].items():
        assert str(plan[name].axes[axis.startswith("in")]) == axis
    base = seeded(make, (4, 4))
    wide = mu.grow(base, lambda: make((8, 12)), plan=plan).model
    assert identity_error(gradients(base, attention_loss), gradients(wide, attention_loss), plan) <= 1e-9
    with refused("layout.undeclared"):
        mu.plans.plan_between(make, (4, 4), (8, 12))


def test_equal_logits_are_not_enough():
    """Query heads copied one by one keep the logits of grouped attention, and train differently."""

    def make(heads: int) -> Any:
        return Attention((4, heads), "grouped")

    declared = {f"{name}.*": {0: 3} for name in "qkv"} | {"o.weight": {1: 3}}
    plan = mu.plans.plan_between(make, 4, 8, declared=mu.Declared(layouts=declared))
    base = seeded(make, 4)
    wide = mu.grow(base, lambda: make(8), plan=plan, prove=False).model
    assert_close(wide(data(4, 5, 3)), base(data(4, 5, 3)), EXACT, "logits")
    assert identity_error(gradients(base, attention_loss), gradients(wide, attention_loss), plan) > 1e-3
    with refused("search.no_exact_plan"):
        mu.plans.plan_between(make, 4, 8, declared=mu.Declared(layouts=declared), loss=attention_loss)


def test_a_plan_cannot_be_changed_and_is_copied_all_the_same():
    """A hash that is kept must stay that of the plan."""
    plan = mu.plans.plan_between(mlp, 4, 8)
    given = dict(plan.tensors)
    made, known = mu.Plan(given), mu.Plan(given).hash
    given["0.weight"] = given["0.bias"]
    assert made.hash == known, "control: the caller's own dict is not the plan's"
    changes = [
        lambda: made.tensors.__setitem__("0.weight", made["0.bias"]),  # type: ignore[index]
        lambda: made.tensors.pop("0.weight"),  # type: ignore[attr-defined]
        lambda: made.ties.update(a="0.weight"),  # type: ignore[attr-defined]
        lambda: made.sources.clear(),  # type: ignore[attr-defined]
    ]
    for change in changes:
        with pytest.raises(TypeError):
            change()
    for again in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), copy.copy(plan)):
        assert (again, again.hash, again.needs) == (plan, plan.hash, plan.needs)
        with pytest.raises(TypeError):
            again.tensors["0.weight"] = plan["0.bias"]  # type: ignore[index]


def test_noise_and_recipes_cannot_be_changed_either():
    noise = mu.diagnostics.resolve_noise({}, mu.MupNoise(0.3), plan=mu.plans.plan_between(mlp, 4, 8))
    recipe = mu.studies.Recipe("torch.optim.AdamW", {"lr": 1e-3}, {"0.weight": 0.1}, k=4, tensors={})
    for value, mapping in ((noise, noise.tensors), (recipe, recipe.constants), (recipe, recipe.sigma)):
        with pytest.raises(TypeError):
            mapping["lr"] = 1.0  # type: ignore[index]
        assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    assert type(recipe.summary()["constants"]) is dict, "what is saved next to weights is plain"


def test_a_stored_need_has_its_kind_again():
    dropped = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    wide = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    plan = mu.infer_plan(dropped, wide)
    for again in (plan, mu.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert [need.kind for need in again.needs] == ["dropout"]
    padded = mu.plans.plan_between(mlp, 4, 6, by="padded")
    assert {need.kind for need in padded.needs} == {"assumption"}, "control"
    stored = json.loads(plan.to_json())
    assert (stored["needs"], stored["need_kinds"]) == (sorted(map(str, plan.needs)), ["dropout"])
    other = mu.Plan.of_json({**stored, "needs": ["other words"]})
    assert [(str(need), need.kind) for need in other.needs] == [("other words", "dropout")]
    assert (other.hash, "need_kinds" in padded.as_json()) == (plan.hash, False), "no part of the identity"
    with refused("plan.malformed_record"):
        mu.Plan.of_json({**stored, "need_kinds": ["no kind"]})


def test_a_need_that_was_stored_without_a_kind_has_one():
    """As 0.2.0 stored it: the sentence alone."""
    stored = mu.plans.plan_between(mlp, 4, 8).as_json()
    said = {"no dropout (1): it is switched off": "dropout", "other words": "assumption"}
    again = mu.Plan.of_json({**stored, "needs": list(said)})
    assert {str(need): need.kind for need in again.needs} == said

"""torch_dist checkpoints of Megatron, built here by its layout: the wide one has the bits of `grow`, and others are refused.

`benchmarks/megatron_run.py` does the same with megatron-core itself.
"""

import io
import pickle
import shutil
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

import mupscale as mu
from harness.closeness import largest_gaps
from harness.megatron_files import key_of
from harness.megatron_files import torch_dist as write
from harness.refusals import refused
from mupscale.files.directory import read_directory
from mupscale.formats.megatron.grow import grow_megatron_checkpoint

WORDS, WIDTH, HEAD, LAYERS = 12, 8, 2, 2


class Attention(nn.Module):
    """Two queries for every key; rows of the fused projection are group by group: queries, key, value."""

    def __init__(self, n):
        super().__init__()
        self.linear_proj = nn.Linear(n, n, bias=False)
        self.linear_qkv = nn.Linear(n, 2 * n, bias=False)

    def forward(self, x):
        parts = self.linear_qkv(x).unflatten(-1, (-1, 4, HEAD))
        q, k, v = parts[..., :2, :], parts[..., 2:3, :], parts[..., 3:, :]
        scores = torch.einsum("btgqd,bsgkd->bgqts", q, k) / HEAD
        mixed = torch.einsum("bgqts,bsgkd->btgqd", scores.tril().sigmoid(), v)
        return self.linear_proj(mixed.flatten(-3))


class Gated(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(n, 6 * n), nn.Linear(3 * n, n, bias=False)

    def forward(self, x):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(gate.sigmoid() * up)


class Layer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.input_layernorm, self.self_attention = nn.RMSNorm(n, eps=1e-5), Attention(n)
        self.pre_mlp_layernorm, self.mlp = nn.RMSNorm(n, eps=1e-5), Gated(n)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Model(nn.Module):
    """A GPTModel as far as names, shapes and layouts go."""

    def __init__(self, n):
        super().__init__()
        heads = {"num_attention_heads": n // HEAD, "num_query_groups": n // HEAD // 2}
        self.config = SimpleNamespace(kv_channels=HEAD, gated_linear_unit=True, **heads)
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(WORDS, n)})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(n) for _ in range(LAYERS))})
        self.decoder["final_layernorm"] = nn.RMSNorm(n, eps=1e-5)
        self.output_layer = nn.Linear(n, WORDS, bias=False)

    def forward(self, words):
        x = self.embedding["word_embeddings"](words)
        layers: Any = self.decoder["layers"]
        for layer in layers:
            x = layer(x)
        return self.output_layer(self.decoder["final_layernorm"](x))


def loss_of(model, seed=0):
    words = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


@lru_cache
def planned(base, wide):
    models = Model(base), Model(wide)
    return mu.infer_plan(*models, loss=loss_of, declared=mu.Declared.megatron(*models))


torch.manual_seed(0)
PLAN = planned(WIDTH, 2 * WIDTH)


def step(run, i):
    loss = loss_of(run.model, i)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return float(loss.detach())


def own_groups(model):
    bare = {n for n, p in model.named_parameters() if p.dim() == 1}
    return [
        {"params": [p for n, p in model.named_parameters() if (n in bare) == (wd == 0)], "weight_decay": wd}
        for wd in (0.1, 0.0)
    ]


def trained():
    torch.manual_seed(0)
    model = Model(WIDTH)
    run = mu.Run(model, torch.optim.AdamW(own_groups(model), lr=0.05, eps=1e-6))
    for i in range(3):
        step(run, i)
    return run


@lru_cache(maxsize=2)
def loaded(folder):
    """Every tensor of a directory, loaded by torch's own reader."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {k: e for k, e in described.items() if isinstance(e, TensorStorageMetadata)}
    tree = {key: torch.zeros(entry.size, dtype=entry.properties.dtype) for key, entry in tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        load(tree, checkpoint_id=folder, no_dist=True)
    return tree


def read(folder, name, state=None):
    key, layer = key_of(name)
    tensor = loaded(folder)[key if state is None else f"optimizer.state.{state}.{key}"]
    return (tensor if layer is None else tensor[layer]).clone()


def groups_in(folder):
    tree = torch.load(folder / "common.pt")["optimizer"]
    return tree["param_groups"] if "param_groups" in tree else tree["optimizer"]["param_groups"]


def restored(folder):
    """A wide run as Megatron would restore it."""
    model = Model(2 * WIDTH)
    own = dict(model.named_parameters())
    groups = groups_in(folder)
    optimizer = torch.optim.AdamW(
        [
            {
                **{k: g[k] for k in ("lr", "eps", "weight_decay", "lr_factor")},
                "params": [own[n] for n in g["param_names"]],
            }
            for g in groups
        ]
    )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(read(folder, name))
            moments = {key: read(folder, name, key) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return mu.Run(model, optimizer)


def goes_on(base, found, odd, plain):
    """The losses of `found` are the base's. Controls: `odd` loses the units of its moments, `plain` its rates."""
    for name, parameter in odd.model.named_parameters():
        odd.optimizer.state[parameter]["exp_avg_sq"] /= float(PLAN[name].change.r) ** 2
    for group in plain.optimizer.param_groups:
        group["lr"] /= group["lr_factor"]
    gaps = largest_gaps(step, base, {"found": found, "odd": odd, "plain": plain}, range(3, 8))
    assert gaps["found"] < 1e-5
    assert min(gaps["odd"], gaps["plain"]) > 1e-3


@pytest.mark.parametrize(("ranks", "copies"), [(1, None), (2, None), (1, "param")])
def test_the_wide_files_have_the_bits_of_widen_and_losses_go_on(tmp_path, ranks, copies):
    """Controls: moments that are copied without units, and the base's own rate in every group, lose the base's losses."""
    run, out = trained(), tmp_path / "wide"
    left = grow_megatron_checkpoint(write(tmp_path / "narrow", run, ranks, copies), out, plan=PLAN)
    assert set(left) == {"common.pt: args", "common.pt: param_groups", "rng_state/shard_0_1"}
    wide, found = mu.grow(run, Model(2 * WIDTH), plan=PLAN), restored(out)
    for (name, a), b in zip(wide.model.named_parameters(), found.model.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert copies is None or torch.equal(a, read(out, name, copies)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(wide.optimizer.state[a][key], found.optimizer.state[b][key]), (name, key)
    goes_on(run, found, restored(out), restored(out))


def test_rates_decay_and_eps_are_where_the_schedule_and_the_optimizer_read_them(tmp_path, monkeypatch):
    """Control: the base's overrides, which there are none of."""

    @dataclass(frozen=True)
    class ParamKey:
        name: tuple[str, ...]

    module = ModuleType("megatron.core.optimizer")
    vars(module)["ParamKey"] = ParamKey
    for name, part in {
        "megatron": ModuleType("megatron"),
        "megatron.core": ModuleType("core"),
        module.__name__: module,
    }.items():
        monkeypatch.setitem(sys.modules, name, part)
    narrow = write(tmp_path / "narrow", trained())
    grow_megatron_checkpoint(narrow, tmp_path / "wide", plan=PLAN)
    overrides = mu.trainers.megatron_overrides(tmp_path / "wide")
    plain = mu.grow(trained(), Model(2 * WIDTH), plan=PLAN)
    names = {p: n for n, p in plain.model.named_parameters()}
    for group in plain.optimizer.param_groups:
        for parameter in group["params"]:
            told = [
                o
                for key, o in overrides.items()
                if any(fnmatch(f"module.{names[parameter]}", n) for n in key.name)
            ]
            assert len(told) == 1, names[parameter]
            assert told[0]["eps"] == group["eps"]
            assert told[0]["max_lr"] == pytest.approx(group["lr"])
            assert told[0]["min_lr"] == pytest.approx(group["lr"] / 5)
            assert 0.1 * told[0]["wd_mult"] == pytest.approx(group["weight_decay"])
    found = [
        tuple(group[k] for k in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))
        for group in groups_in(tmp_path / "wide")
    ]
    assert len(set(found)) == len(found) == len(overrides) > 2
    assert any(override["default_config"] for override in overrides.values())
    with refused("megatron.was_not_grown", where="grow_checkpoint"):
        mu.trainers.megatron_overrides(narrow)


def test_a_folder_of_iterations_and_growing_twice(tmp_path):
    """The folder of the last iteration is grown; groups that name their tensors need no rule. Control: another folder."""
    run, out = trained(), tmp_path / "wide"
    write(tmp_path / "run" / "iter_0000003", run)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3\n")
    grow_megatron_checkpoint(tmp_path / "run", out, plan=PLAN)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "3"
    again = planned(2 * WIDTH, 4 * WIDTH)
    left = grow_megatron_checkpoint(out, tmp_path / "wider", plan=again)
    assert left == {}
    whole = mu.grow(run, Model(4 * WIDTH), plan=PLAN.then(again), prove=False)
    for name, parameter in whole.model.named_parameters():
        found = read(tmp_path / "wider" / "iter_0000003", name, "exp_avg_sq")
        assert torch.equal(found, whole.optimizer.state[parameter]["exp_avg_sq"]), name
    lr = {g["lr"] for g in whole.optimizer.param_groups}
    assert {g["lr"] for g in groups_in(tmp_path / "wider" / "iter_0000003")} == lr
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("4")
    refuse(tmp_path / "run", tmp_path, "megatron.no_metadata", "iter_0000004")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("4" * 5000)
    refuse(tmp_path / "run", tmp_path, "megatron.iteration_not_number", "latest_checkpointed_iteration.txt")


def test_noise_on_a_grown_checkpoint_is_that_of_its_first_base(tmp_path):
    """Named by its run or by its iteration, it gets the same noise. Without its record it gets none; copying that helps."""
    write(tmp_path / "run" / "iter_0000003", trained())
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    grow_megatron_checkpoint(tmp_path / "run", tmp_path / "wide", plan=PLAN)
    again = {"plan": planned(2 * WIDTH, 4 * WIDTH), "noise": mu.SignalNoise(0.1), "seed": 1}
    mu.grow_checkpoint(tmp_path / "wide", tmp_path / "a", **again)
    grow_megatron_checkpoint(tmp_path / "wide" / "iter_0000003", tmp_path / "b", **again)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(read(tmp_path / "a" / "iter_0000003", name), read(tmp_path / "b", name))
    shutil.copytree(tmp_path / "wide" / "iter_0000003", tmp_path / "saved")
    refuse(tmp_path / "saved", tmp_path, "noise.first_base_unknown", "mupscale.json", **again)
    shutil.copy(tmp_path / "wide" / "mupscale.json", tmp_path / "saved")
    grow_megatron_checkpoint(tmp_path / "saved", tmp_path / "c", **again)
    assert torch.equal(read(tmp_path / "b", name), read(tmp_path / "c", name))


def test_the_optimizer_of_transformer_engine_is_told_by_its_groups(tmp_path):
    """Control: one more setting, and it is not."""

    def fused(_, common):
        kept = (
            "lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult", "is_expert_parallel",
            "is_decoupled_lr", "max_lr", "min_lr",
        )  # fmt: skip
        tree = common["optimizer"]
        tree["param_groups"] = [
            {**{k: g[k] for k in kept}, "bias_correction": True, "step": 3} for g in tree["param_groups"]
        ]

    grow_megatron_checkpoint(
        write(tmp_path / "narrow", trained(), change=fused), tmp_path / "wide", plan=PLAN
    )
    plain = mu.grow(trained(), Model(2 * WIDTH), plan=PLAN)
    assert {g["lr"] for g in groups_in(tmp_path / "wide")} == {g["lr"] for g in plain.optimizer.param_groups}

    def more(tensors, common):
        fused(tensors, common)
        edit(its_own=1)(tensors, common)

    refuse(write(tmp_path / "odd", trained(), change=more), tmp_path, "state.optimizer_unclear", "its_own")


@pytest.mark.filterwarnings("ignore:.*that nothing parts")
@pytest.mark.parametrize("noise", [mu.SignalNoise(0.1), mu.SplitNoise()], ids=["added", "split"])
def test_weights_in_bfloat16_are_rounded_from_their_copies(tmp_path, noise):
    """Control: the base's own bfloat16 weights, with the same noise, round otherwise."""
    run = trained()
    narrow = write(tmp_path / "narrow", run, copies="fp32_param", dtype=torch.bfloat16)
    grow_megatron_checkpoint(narrow, tmp_path / "wide", plan=PLAN, noise=noise, seed=5)
    same, other = (mu.upscale(run, Model(2 * WIDTH), plan=PLAN, noise=noise, seed=seed) for seed in (5, 6))
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    weight = same.model.get_parameter(name).detach()
    assert torch.equal(read(tmp_path / "wide", name, "fp32_param"), weight)
    assert torch.equal(read(tmp_path / "wide", name), weight.bfloat16())
    assert not torch.equal(read(tmp_path / "wide", name, "fp32_param"), other.model.get_parameter(name))


def test_groups_can_be_named_and_must_be_when_the_rule_does_not_tell_them(tmp_path):
    run = trained()
    names = {p: n for n, p in run.model.named_parameters()}
    members = [[names[p] for p in group["params"]] for group in run.optimizer.param_groups]

    def both_decay(_, common):
        common["optimizer"]["param_groups"][1]["wd_mult"] = 0.5

    narrow = write(tmp_path / "narrow", run, change=both_decay)
    refuse(narrow, tmp_path, "state.groups_ambiguous", "names=")
    left = grow_megatron_checkpoint(narrow, tmp_path / "wide", plan=PLAN, names=members)
    assert "common.pt: param_groups" not in left
    refuse(narrow, tmp_path, "state.in_no_group", names=members[:1] * 2)
    refuse(narrow, tmp_path, "state.names_not_per_group", names=members[:1])
    refuse(narrow, tmp_path, "state.names_not_lists", names=members[0][:2])
    refuse(narrow, tmp_path, "plan.unknown_tensor", "stranger", names=[[*members[0], "stranger"], members[1]])
    refuse(narrow, tmp_path, "state.in_no_group", members[0][0], names=[members[0][1:], members[1]])


def refuse(folder, tmp_path, code, where=(), **given):
    with refused(code, where=where):
        grow_megatron_checkpoint(folder, tmp_path / "refused", **{"plan": PLAN, **given})
    assert not (tmp_path / "refused").exists()


def edit(**changes):
    """Change the optimizer's groups."""
    return lambda _, common: [group.update(changes) for group in common["optimizer"]["param_groups"]]


FC2 = "decoder.layers.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda t, _: t.update({("stranger.weight", None): torch.ones(2)}), "checkpoint.tensor_not_in_plan", "stranger.weight"),
        (lambda t, _: t.pop(("output_layer.weight", None)), "checkpoint.tensor_missing", "output_layer.weight"),
        (lambda t, _: t.update({("output_layer.weight", None): torch.ones(2, 2)}), "checkpoint.shape_differs", "output_layer.weight"),
        (lambda t, _: t.update({("optimizer.distributed.dp_group_idx_0.gbuf_idx_0", None): torch.ones(2)}), "megatron.buckets_not_read", "gbuf_idx_0"),
        (lambda _, c: c.pop("optimizer"), "megatron.state_without_optimizer", "optimizer.state.exp_avg"),
        (lambda _, c: c.update(optimizer={0: c["optimizer"], 1: c["optimizer"]}), "megatron.no_param_groups", "common.pt"),
        (edit(is_expert_parallel=True), "megatron.group_of_experts", "param_groups[0]"),
        (
            lambda tensors, _: tensors.update({("decoder.layers.mlp.experts.experts.linear_fc1.weight", i): torch.ones(4, 6, 8) for i in range(2)}),
            "megatron.experts_not_read",
            "experts.experts.linear_fc1",
        ),
        (edit(max_lr="fast"), "state.setting_not_a_number", "max_lr"),
        (edit(wd_mult=None), "megatron.no_decay_multiplier", "wd_mult"),
        (edit(lr="fast"), "state.setting_not_a_number", "fast"),
        (edit(param_names=5), "megatron.names_not_a_list", "param_names"),
        (edit(foreach=Namespace()), "state.setting_is_object", "foreach"),
        (lambda _, c: c.update(opt_param_scheduler=[1]), "megatron.unknown_scheduler", "opt_param_scheduler"),
        (lambda t, _: t.pop(("optimizer.state.exp_avg.output_layer.weight", None)), "state.entry_missing", ("output_layer.weight", "exp_avg")),
        (lambda t, _: [t.pop((FC2, i)) for i in range(LAYERS)] and t.update({(FC2, None): torch.ones(())}), "checkpoint.other_layer_count", FC2),
        (edit(its_own=1), "state.optimizer_unclear", ("its_own", "optimizer_class=")),
        (lambda t, _: t.update({("optimizer.state.third.output_layer.weight", None): torch.ones(WORDS, WIDTH)}), "state.entry_missing", "third"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unknown_is_refused_by_name(tmp_path, change, code, where):
    refuse(write(tmp_path / "narrow", trained(), change=change), tmp_path, code, where)


def test_other_formats_are_refused_and_other_doors_say_where_to_go(tmp_path):
    narrow = write(tmp_path / "narrow", trained())
    refuse(narrow, tmp_path, "checkpoint.shape_differs", plan=planned(2 * WIDTH, 4 * WIDTH))
    for door in (lambda: mu.load_grown_(narrow, Model(2 * WIDTH), plan=PLAN), lambda: read_directory(narrow)):
        with refused("directory.is_megatron", where="grow_checkpoint"):
            door()
    (narrow / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refuse(narrow, tmp_path, "megatron.other_format", "zarr")
    (narrow / "metadata.json").unlink()
    refuse(narrow, tmp_path, "megatron.no_model_tensors", "fsdp_dtensor")


def test_chunks_that_cut_a_tensor_twice_are_refused(tmp_path):
    narrow = write(tmp_path / "narrow", trained())
    metadata = pickle.loads((narrow / ".metadata").read_bytes())
    name, half = "output_layer.weight", WIDTH // 2
    with (narrow / "__0_0.distcp").open("ab") as file:
        chunks = []
        for row, rows in ((0, 5), (5, WORDS - 5)):
            for column in (0, half):
                start, shape = torch.Size([row, column]), torch.Size([rows, half])
                at = file.tell()
                torch.save(torch.ones(shape), raw := io.BytesIO())
                file.write(raw.getvalue())
                chunks.append(ChunkStorageMetadata(start, shape))
                metadata.storage_data[MetadataIndex(name, start)] = _StorageInfo(
                    "__0_0.distcp", at, file.tell() - at
                )
    metadata.state_dict_metadata[name].chunks = chunks
    (narrow / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(narrow, tmp_path, "megatron.cut_along_several", (name, "[0, 1]"))


@pytest.mark.parametrize("file", ["common.pt", ".metadata"])
def test_no_pickle_is_executed(tmp_path, file):
    """Control: Python's own reader springs the trap."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    narrow = write(tmp_path / "narrow", trained())
    if file == "common.pt":
        torch.save({**torch.load(narrow / file, weights_only=False), "mine": Trap()}, narrow / file)
        left = grow_megatron_checkpoint(narrow, tmp_path / "wide", plan=PLAN)
        assert "common.pt: mine" in left
        assert "mine" not in torch.load(tmp_path / "wide" / file)
    else:
        metadata = pickle.loads((narrow / file).read_bytes())
        metadata.all_local_plans = [Trap()]
        (narrow / file).write_bytes(pickle.dumps(metadata))
        refuse(narrow, tmp_path, "pickle.forbidden_name", "open")
    assert not (tmp_path / "sprung").exists()
    if file == "common.pt":
        torch.load(narrow / file, weights_only=False)["mine"].close()
    else:
        pickle.loads((narrow / file).read_bytes()).all_local_plans[0].close()
    assert (tmp_path / "sprung").exists()


def test_layouts_are_refused_where_heads_change(tmp_path):
    wide = Model(2 * WIDTH)
    wide.config.kv_channels = 2 * HEAD
    with refused("layout.heads_differ", where="num_query_groups"):
        mu.Declared.megatron(Model(WIDTH), wide)


def test_layouts_of_other_tensors_join_those_of_megatron():
    """Control: without them they are not declared."""
    models = Model(WIDTH), Model(2 * WIDTH)
    found = mu.Declared.megatron(*models)
    more = mu.Declared.megatron(*models, layouts={"output_layer.weight": {1: 2}}, plus_one=["*layernorm*"])
    assert more.layouts == {**found.layouts, "output_layer.weight": {1: 2}}
    assert more.plus_one == ["*layernorm*"]
    assert "output_layer.weight" not in found.layouts
    with refused("argument.wrong_type", where="layouts"):
        mu.Declared.megatron(*models, layouts=["output_layer.weight"])

"""The stock Trainer resumes a widened checkpoint and continues like the base; what is in doubt is refused."""

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mupscale as mu
from harness import trainer as bench
from harness.refusals import refusal
from harness.trainer import Setting, gap, grow_directory, hugging_face, model, plan_for
from mupscale.checkpoints.result.not_carried import not_carried
from mupscale.checkpoints.state.trainer_state import trainer_moves, trainer_order
from mupscale.files.directory import read_directory
from mupscale.files.pickles.torch_file import read_tree
from mupscale.jobs.digests import make_job
from mupscale.jobs.worker import run_job

pytest.importorskip("transformers")

K = 2
ARGS = SimpleNamespace(deepspeed=None, fsdp=None, max_grad_norm=1.0)
QUIET: dict[str, Any] = {"save_strategy": "no"}


@pytest.fixture(scope="module")
def setting(trained, tmp_path_factory):
    folder, base, plan = tmp_path_factory.mktemp("trainer"), trained.directory, plan_for(K)
    wide = grow_directory(base, folder / "wide", plan, model(), model(K))
    return Setting(folder=folder, base=base, wide=wide, plan=plan, curve=trained.curve)


@pytest.fixture(scope="module")
def grown(setting):
    """The wide run from step 20 to 40 in one go, with a checkpoint at 30."""
    return hugging_face(
        model(K), setting.folder / "grown", setting.wide, [mu.trainers.HuggingFaceCallback(setting.wide)]
    )


def test_the_wide_run_goes_on_like_the_base(setting, grown):
    curve, trainer = grown
    assert sorted(curve.losses) == list(range(21, 41))
    assert gap(setting.curve.losses, curve.losses) < bench.EQUAL
    assert setting.curve.rates == curve.rates
    assert gap(setting.curve.norms, curve.norms) < bench.EQUAL
    assert min(setting.curve.norms.values()) > bench.CLIP, "clipping acts at every step"
    assert trainer.args.max_grad_norm == bench.CLIP
    assert not bench_optimizer(trainer)._optimizer_step_pre_hooks


def bench_optimizer(trainer: Any) -> Any:
    return trainer.optimizer.optimizer


def test_without_the_callback_it_does_not(setting):
    """Controls: no callback; right units with the stock norm."""
    plain, _ = hugging_face(model(K), setting.folder / "plain", setting.wide, **QUIET)
    assert gap(setting.curve.losses, plain.losses) > bench.DIFFERENT

    class StockNorm(mu.trainers.HuggingFaceCallback):
        """Right units, but the Trainer continues to clip by its own norm."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for handle in self._clip_handles:
                handle.remove()

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pass

    stock, _ = hugging_face(
        model(K), setting.folder / "stock", setting.wide, [StockNorm(setting.wide)], stop=30, **QUIET
    )
    assert gap(setting.curve.losses, stock.losses) > 10 * bench.EQUAL


def test_a_wide_run_that_was_stopped_is_resumed_the_same_way(setting, grown):
    later = setting.folder / "grown" / "checkpoint-30"
    assert json.loads((later / "mupscale.json").read_text()) == json.loads(
        (setting.wide / "mupscale.json").read_text()
    )
    saved = torch.load(later / "training_args.bin", weights_only=False)
    assert saved.max_grad_norm == bench.CLIP, "what is saved has the user's own value"
    groups = torch.load(later / "optimizer.pt", weights_only=True)["param_groups"]
    assert [len(group["params"]) for group in groups] == [15, 5]
    assert {group["eps"] for group in groups} == {bench.EPS}
    curve, _ = hugging_face(
        model(K), setting.folder / "again", later, [mu.trainers.HuggingFaceCallback(later)], **QUIET
    )
    assert curve.losses == {step: loss for step, loss in grown[0].losses.items() if step > 30}
    assert curve.rates == {step: rate for step, rate in grown[0].rates.items() if step > 30}


def test_new_units_wake_without_a_jump_and_train_on(trained, tmp_path):
    """Control: a run whose units sleep has the losses of the base to its end."""
    plan, base = plan_for(K, by="units"), trained.directory
    asleep = grow_directory(base, tmp_path / "asleep", plan, model(), model(K))
    wide = Path(shutil.copytree(asleep, tmp_path / "wide"))
    live: Any = mu.upscale(type(model()).from_pretrained(base), lambda: model(K), plan=plan).model
    live.save_pretrained(wide)

    def go_on(name: str, start: Path, **options: Any) -> bench.Curve:
        on = mu.trainers.HuggingFaceCallback(start, **options.pop("on", {}))
        return hugging_face(model(K), tmp_path / name, start, [on], **options)[0]

    curve = go_on("run", wide)
    assert gap(trained.curve.losses, {21: curve.losses[21]}) < bench.EQUAL
    assert gap(trained.curve.losses, curve.losses) > bench.DIFFERENT
    assert curve.losses[40] < curve.losses[21]
    assert curve.rates == trained.curve.rates
    again = go_on("again", tmp_path / "run" / "checkpoint-30", **QUIET)
    assert again.losses == {step: loss for step, loss in curve.losses.items() if step > 30}
    assert gap(trained.curve.losses, go_on("same", asleep, stop=26, **QUIET).losses) < bench.EQUAL
    new = mu.GrowthSchedule(20, warmup=0.2)
    warmed = go_on("warmed", wide, on={"rewarm": new}, stop=26, **QUIET)
    assert gap(trained.curve.losses, {21: warmed.losses[21]}) < bench.EQUAL
    assert warmed.rates == pytest.approx({21 + i: bench.RATE / 2 * new(i) for i in range(6)})


def test_the_streamed_state_is_the_state_dict_map(setting):
    base = torch.load(setting.base / "optimizer.pt", weights_only=True)
    order = trainer_order(model(), setting.plan.ties)
    names = [name for group in order for name in group]
    oracle = mu.trainers.grow_optimizer_state_dict(base, setting.plan, torch.optim.AdamW, names=names)
    by_name = {
        n: oracle["state"][i]
        for g in oracle["param_groups"]
        for i, n in zip(g["params"], g["param_names"], strict=True)
    }
    for mapped in (False, True):
        wide = torch.load(setting.wide / "optimizer.pt", weights_only=True, mmap=mapped)
        assert wide["param_groups"] == base["param_groups"]
        assert len(wide["state"]) == len(names)
        for i, name in enumerate(names):
            assert wide["state"][i].keys() == by_name[name].keys()
            for key, value in by_name[name].items():
                assert torch.equal(wide["state"][i][key], value), (name, key)
    for name in ("scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        assert (setting.wide / name).read_bytes() == (setting.base / name).read_bytes()


def test_the_bytes_do_not_depend_on_how_they_are_written(setting, tmp_path):
    written = []
    for block in (1 << 10, 1 << 20):
        file, moves = trainer_moves(setting.base, setting.plan, model(), model(K))
        run_job(make_job(setting.base, tmp_path / f"{block}", [file], moves, block_bytes=block))
        written.append((tmp_path / f"{block}" / "optimizer.pt").read_bytes())
    assert written[0] == written[1] == (setting.wide / "optimizer.pt").read_bytes()


VARIANTS: dict[str, dict[str, Any]] = {
    "fused, constant": {"optim": "adamw_torch_fused", "lr_scheduler_type": "constant_with_warmup"},
    "SGD, plateau": {
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"min_lr": 1e-3},
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
    "RMSprop, floor": {"optim": "rmsprop", "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
    "Adagrad, no clipping": {"optim": "adagrad", "max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "Adafactor": {"optim": "adafactor"},
    "Lion": {"optim": "lion_32bit", "learning_rate": 3e-4},
    "schedule-free": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
}  # fmt: skip


PACKAGES = {"Lion": "bitsandbytes", "schedule-free": "schedulefree"}
ROWS = {"Lion": "bitsandbytes.optim.Lion"}  # its file could be that of RMSprop, whose state has other units


@pytest.mark.parametrize("name", VARIANTS)
def test_other_optimizers_and_schedulers_of_the_trainer(name, setting, tmp_path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    options = {"save_steps": 4, "learning_rate": 3e-3, **VARIANTS[name]}
    _, trainer = hugging_face(model(), tmp_path / "base", stop=4, **options)
    base = tmp_path / "base" / "checkpoint-4"
    row = ROWS.get(name)
    wide = grow_directory(base, tmp_path / "wide", setting.plan, trainer.model, model(K), optimizer=row)
    on, _ = hugging_face(model(), tmp_path / "on", base, stop=9, **{**options, **QUIET})
    callback = mu.trainers.HuggingFaceCallback(wide)
    curve, _ = hugging_face(model(K), tmp_path / "w", wide, [callback], stop=9, **{**options, **QUIET})
    assert gap(on.losses, curve.losses) < bench.EQUAL
    assert on.rates == curve.rates


def test_the_trainer_goes_on_with_quantised_state(tmp_path):
    """Rows of 256 are whole blocks, so the codes are kept; later steps round in other blocks."""
    pytest.importorskip("bitsandbytes")
    from transformers import LlamaForCausalLM

    def sizes(k: int) -> dict[str, int]:
        heads = {"num_attention_heads": 4 * k, "num_key_value_heads": 2 * k, "head_dim": 64}
        return {"hidden_size": 256 * k, "intermediate_size": 256 * k, "num_hidden_layers": 1, **heads}

    rows = torch.stack([row["input_ids"] for row in bench.data()[:4]])
    ends = (bench.config(1, **sizes(k)) for k in (1, K))
    plan = mu.plans.plan_between(LlamaForCausalLM, *ends, loss=lambda m: m(input_ids=rows, labels=rows).loss)
    options: dict[str, Any] = {"optim": "adamw_bnb_8bit", "learning_rate": 1e-3, "save_steps": 4}
    _, trainer = hugging_face(model(**sizes(1)), tmp_path / "base", stop=4, **options)
    states = bench_optimizer(trainer).state.values()
    assert sum(state["state1"].dtype == torch.uint8 for state in states) == 7, (
        "the rest is small, or an embedding"
    )
    base = tmp_path / "base" / "checkpoint-4"
    with pytest.warns(UserWarning, match="0 of the 14 "):
        wide = grow_directory(base, tmp_path / "wide", plan, trainer.model, model(**sizes(K)))
    on, _ = hugging_face(model(**sizes(1)), tmp_path / "on", base, stop=8, **{**options, **QUIET})
    curves = []
    for _ in range(2):
        callback = mu.trainers.HuggingFaceCallback(wide)
        grown = model(**sizes(K))
        curve, _ = hugging_face(grown, tmp_path / "w", wide, [callback], stop=8, **{**options, **QUIET})
        curves.append(gap(on.losses, curve.losses))
        (wide / "optimizer.pt").unlink(missing_ok=True)
    assert curves[0] < 1e-3
    assert curves[1] > 1e-2, "control: without the state"


def test_bf16_autocast_goes_on_as_well_as_its_rounding_allows(setting):
    options = {**QUIET, "bf16": True}
    on, _ = hugging_face(model(), setting.folder / "b16", setting.base, stop=25, **options)
    callback = mu.trainers.HuggingFaceCallback(setting.wide)
    curve, _ = hugging_face(model(K), setting.folder / "w16", setting.wide, [callback], stop=25, **options)
    assert gap(on.losses, curve.losses) < 5e-3


def test_one_trainer_and_one_callback_serve_several_runs(setting, tmp_path):
    """A second call of train() trains on; a run that raises leaves nothing behind for the next."""
    from transformers import Trainer, TrainerCallback

    class Fails(TrainerCallback):
        active = True

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.active:
                raise RuntimeError("no step today")

    fails, callback = Fails(), mu.trainers.HuggingFaceCallback(setting.plan)
    options = bench.arguments(tmp_path, **{**QUIET, "max_steps": 23})
    trainer = Trainer(model=model(K), args=options, train_dataset=bench.data(), callbacks=[callback, fails])
    with pytest.raises(RuntimeError, match="no step today"):
        trainer.train(resume_from_checkpoint=str(setting.wide))
    fails.active = False
    trainer.train(resume_from_checkpoint=str(setting.wide))
    first = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e and e["step"] > 20}
    assert trainer.args.max_grad_norm == bench.CLIP
    trainer.train(resume_from_checkpoint=str(setting.wide))
    second = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e and e["step"] > 20}
    assert first == second
    assert trainer.args.max_grad_norm == bench.CLIP


def test_a_plan_in_place_of_a_directory_is_written_beside_each_checkpoint(setting, tmp_path):
    callback = mu.trainers.HuggingFaceCallback(setting.plan)
    hugging_face(model(K), tmp_path, setting.wide, [callback], stop=30)
    again = mu.trainers.HuggingFaceCallback(tmp_path / "checkpoint-30")
    assert again.plans == (setting.plan, setting.plan)


def test_sharded_training_is_refused():
    callback = mu.trainers.HuggingFaceCallback(mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4))
    args = SimpleNamespace(deepspeed="zero3.json", fsdp=["full_shard"], max_grad_norm=1.0)
    error = refusal(
        lambda: callback.on_train_begin(args, None, None, model=None, optimizer=None),
        "trainer.shards_parameters",
        where=("deepspeed", "fsdp"),
    )
    assert len(error.faults) == 2


@pytest.mark.parametrize("alpha", [5.0, None])
def test_noise_of_neftune_is_said_by_directory_and_callback(alpha, setting, tmp_path):
    folder = shutil.copytree(setting.base, tmp_path / "base")
    torch.save(bench.arguments(tmp_path, neftune_noise_alpha=alpha), folder / "training_args.bin")
    said = not_carried(read_directory(folder), "")
    assert ("training_args.bin: neftune_noise_alpha" in said) is (alpha is not None)
    layer = nn.Linear(4, 4)
    begin = mu.trainers.HuggingFaceCallback(
        mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    ).on_train_begin
    args = SimpleNamespace(**vars(ARGS), neftune_noise_alpha=alpha)
    optimizer = torch.optim.AdamW(layer.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.warns(UserWarning, match="neftune") if alpha else contextlib.nullcontext():
        begin(args, None, None, model=layer, optimizer=optimizer, lr_scheduler=scheduler)


def test_sharding_that_the_arguments_do_not_show_is_refused(tmp_path):
    """`accelerate launch --use_fsdp` shards parameters, and `args.fsdp` stays empty."""
    sharded, plan = nn.Linear(4, 4), mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        begin = partial(mu.trainers.HuggingFaceCallback(plan).on_train_begin, ARGS, None, None, model=sharded)
        refusal(
            lambda: begin(optimizer=torch.optim.AdamW(sharded.parameters())),
            "trainer.shards_parameters",
            where="FSDP",
        )
    finally:
        dist.destroy_process_group()


def test_the_callback_is_one_class_that_can_be_pickled(setting):
    callback = pickle.loads(pickle.dumps(mu.trainers.HuggingFaceCallback(setting.plan)))
    assert type(callback) is mu.trainers.HuggingFaceCallback
    with pytest.raises(AttributeError):
        mu.NoSuchCallback  # noqa: B018


def test_importing_the_package_imports_no_trainer():
    code = "import sys, mupscale; sys.exit(any(m in sys.modules for m in ('transformers', 'lightning', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def saved(setting: Setting, folder: Path, change: Any) -> Path:
    """The base's directory with a changed optimizer.pt."""
    folder.mkdir(exist_ok=True)
    state = torch.load(setting.base / "optimizer.pt", weights_only=True)
    torch.save(change(state) or state, folder / "optimizer.pt")
    return folder


def refuse(setting: Setting, folder: Path, code: str, where: str = "", **options: Any) -> None:
    refusal(lambda: trainer_moves(folder, setting.plan, model(), model(K), **options), code, where=where)


def drop_last(state: Any) -> None:
    state["param_groups"][1]["params"].pop()


def split(state: Any) -> None:
    first = state["param_groups"][0]
    extra = {**first, "params": first["params"][10:]}
    first["params"] = first["params"][:10]
    state["param_groups"].insert(1, extra)


def unknown_state(state: Any) -> None:
    state["state"][0]["preconditioner"] = torch.ones(3)


def unknown_setting(state: Any) -> None:
    for group in state["param_groups"]:
        group["momentum_of_the_moon"] = 0.1


def other_shapes(state: Any) -> None:
    a, b = state["state"][0], state["state"][1]
    state["state"][0], state["state"][1] = b, a


def second_decays(state: Any) -> None:
    state["param_groups"][1]["weight_decay"] = 0.1


def tensor_rate(state: Any) -> None:
    state["param_groups"][0]["lr"] = torch.tensor(1e-3)


def not_contiguous(state: Any) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].T.contiguous().T


def an_orphan(state: Any) -> None:
    state["state"][99] = dict(state["state"][0])


def a_list(state: Any) -> Any:
    return [state]


DOUBTS = {
    drop_last: ("state.group_sizes_differ", "param_groups"),
    split: ("state.groups_ambiguous", "param_groups"),
    unknown_state: ("state.optimizer_unclear", "preconditioner"),
    unknown_setting: ("state.optimizer_unclear", "momentum_of_the_moon"),
    other_shapes: ("state.other_shape", "exp_avg"),
    second_decays: ("state.groups_ambiguous", "param_groups"),
    tensor_rate: ("state.setting_is_tensor", "lr"),
    not_contiguous: ("archive.not_contiguous", ""),
    an_orphan: ("state.in_no_group", "99"),
    a_list: ("state.not_a_state_dict", "optimizer.pt"),
}


@pytest.mark.parametrize("change", DOUBTS, ids=lambda change: change.__name__)
def test_state_in_doubt_is_refused(change, setting, tmp_path):
    refuse(setting, saved(setting, tmp_path, change), *DOUBTS[change])


def test_the_user_can_say_what_the_file_does_not(setting, tmp_path):
    names = trainer_order(model(), setting.plan.ties)
    three = [names[0][:10], names[0][10:], names[1]]
    _, moves = trainer_moves(saved(setting, tmp_path, split), setting.plan, model(), model(K), names=three)
    _, usual = trainer_moves(setting.base, setting.plan, model(), model(K), optimizer="torch.optim.AdamW")
    assert [(m.name, m.making) for m in moves] == [(m.name, m.making) for m in usual]
    refuse(setting, setting.base, "state.unknown_key", optimizer="torch.optim.SGD")


def touch(path: str) -> None:
    Path(path).touch()


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return touch, (str(self.path),)


def test_a_pickle_is_never_executed(setting, tmp_path):
    marker = tmp_path / "executed"
    torch.save({"state": {}, "param_groups": [Evil(marker)]}, tmp_path / "optimizer.pt")
    refuse(setting, tmp_path, "archive.more_than_tensors", "optimizer.pt")
    (tmp_path / "optimizer.pt").write_bytes(pickle.dumps(Evil(marker)))
    refuse(setting, tmp_path, "archive.not_torch_save", "optimizer.pt")
    assert not marker.exists()


def test_damaged_files_end_in_one_readable_error(setting, tmp_path):
    whole = (setting.base / "optimizer.pt").read_bytes()
    generator = torch.Generator().manual_seed(0)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    ends = model(), model(K)
    for i in range(60):
        raw = bytearray(whole)
        if i % 3 == 0:
            raw = raw[: draw(len(raw))]
        else:  # in the pickle or in the archive's directory
            at = draw(4000) if i % 3 == 1 else len(raw) - 1 - draw(4000)
            raw[at] ^= 1 << draw(8)
        (tmp_path / "optimizer.pt").write_bytes(raw)
        with contextlib.suppress(mu.MupscaleError):  # a flip may also change a number, or padding
            trainer_moves(tmp_path, setting.plan, *ends)
    (tmp_path / "optimizer.pt").unlink()
    refuse(setting, tmp_path, "file.does_not_exist", "optimizer.pt")
    shutil.copytree(setting.base, tmp_path / "optimizer.pt")
    refuse(setting, tmp_path, "file.not_regular", "optimizer.pt")


def test_a_compressed_archive_is_refused(setting, tmp_path):
    with (
        zipfile.ZipFile(setting.base / "optimizer.pt") as old,
        zipfile.ZipFile(tmp_path / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    refusal(lambda: read_tree(tmp_path / "optimizer.pt"), "archive.is_compressed")

"""The command line from end to end on a small Llama: plan, grow, upscale, check, and what they refuse."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")
from safetensors.torch import load_file, save_file  # noqa: E402

from harness.closeness import SINGLE, difference  # noqa: E402
from harness.refusals import refused  # noqa: E402
from harness.tiny_llama import cli  # noqa: E402
from mupscale.checkpoints.base import Base  # noqa: E402
from mupscale.checkpoints.resume import job_again  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.files.strict import parse_json  # noqa: E402
from mupscale.jobs import job as job_module  # noqa: E402
from mupscale.jobs import partial, worker  # noqa: E402
from mupscale.jobs.bytes.blocks import finite_moves  # noqa: E402
from mupscale.jobs.threads import in_threads as run_in_threads  # noqa: E402
from mupscale.models.float64 import lifted_casts  # noqa: E402
from mupscale.runs.growth_record import read_plans, read_record  # noqa: E402

SIZES = dict(  # noqa: C408
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
)  # fmt: skip


def save_llama(folder, **changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes})
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder)
    return folder


@pytest.fixture(scope="module")
def wide(planned_here, base, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "wide"
    assert main(["grow", str(base), str(out), "-k", "2", "--quiet", "--threads", "1"]) == 0
    return out


@pytest.fixture(scope="module")
def noisy(planned_here, base, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "noisy"
    arguments = ["upscale", str(base), str(out), "-k", "2", "--noise", "t=0.2", "--seed", "3", "--quiet"]
    assert main(arguments) == 0
    return out


@torch.no_grad()
def logits(folder):
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model(input_ids=torch.arange(20)[None]).logits


def test_the_stock_class_loads_it_and_the_function_is_the_base_s(base, wide):
    assert difference(logits(wide), logits(base)) < SINGLE


def test_noise_moves_the_output_and_is_the_live_path_s_bit_for_bit(base, wide, noisy):
    import mupscale as mu

    assert float((logits(noisy) - logits(base)).abs().max()) > 1e-3
    plan, _ = read_plans(noisy)
    live = transformers.LlamaForCausalLM.from_pretrained(base)
    config = transformers.LlamaConfig.from_pretrained(noisy)
    run = mu.upscale(
        live, lambda: transformers.LlamaForCausalLM(config), mu.SignalNoise(0.2), seed=3, plan=plan
    )
    stored = load_file(noisy / "model.safetensors")
    named = dict(run.model.named_parameters())
    assert all(torch.equal(stored[name], named[name]) for name in stored)


def test_a_directory_a_run_and_checkpoints_of_trainers_have_one_history(base, noisy, tmp_path):
    import mupscale as mu

    plan, _ = read_plans(noisy)
    config = transformers.LlamaConfig.from_pretrained(noisy)
    narrow = transformers.LlamaConfig.from_pretrained(base)
    narrow.name_or_path = config.name_or_path
    # Not from_pretrained, which gives a live model settings that no file has.
    start = transformers.LlamaForCausalLM(narrow)
    start.load_state_dict(load_file(base / "model.safetensors"), strict=False)

    def make():
        return transformers.LlamaForCausalLM(config)

    live = mu.upscale(start, make, mu.SignalNoise(0.2), seed=3, plan=plan)
    loaded = mu.load_grown_(base, make(), plan=plan, noise=mu.SignalNoise(0.2), seed=3)
    streamed = mu.diagnostics.read_provenance(noisy)
    assert streamed["loss"]["before"] < streamed["loss"]["after"]
    found = {"streamed": streamed.noting(loss=None), "live": live.provenance, "loaded": loaded.provenance}
    state = SimpleNamespace(global_step=5, is_world_process_zero=True)
    for name, callback in (
        ("run", mu.trainers.HuggingFaceCallback(live)),
        ("directory", mu.trainers.HuggingFaceCallback(noisy)),
    ):
        (folder := tmp_path / name / "checkpoint-5").mkdir(parents=True)
        callback.on_save(SimpleNamespace(output_dir=tmp_path / name), state, None)
        found[f"Trainer, {name}"] = mu.diagnostics.read_provenance(folder).noting(loss=None)
    pytest.importorskip("lightning")
    held: dict[str, Any] = {}
    mu.trainers.LightningCallback(live).on_save_checkpoint(None, None, held)
    torch.save(held, tmp_path / "later.ckpt")
    found["Lightning"] = mu.diagnostics.read_provenance(tmp_path / "later.ckpt")
    for name, other in found.items():
        assert other == live.provenance, name
    control = mu.load_grown_(base, make(), plan=plan, noise=mu.SignalNoise(0.2), seed=4)
    assert control.provenance != live.provenance, "control: another seed"


@pytest.mark.parametrize(
    ("multipliers", "noisy"),
    [("hidden=2,heads=2", {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}),
     ("ffn=2", {"up_proj", "gate_proj", "down_proj"})],
)  # fmt: skip
def test_streamed_noise_leaves_out_what_does_not_grow_and_the_padding_row(multipliers, noisy, tmp_path):
    import mupscale as mu

    base = save_llama(tmp_path / "base", pad_token_id=5)
    for verb, more in (("grow", []), ("upscale", ["--noise", "t=0.2", "--seed", "3"])):
        arguments = [verb, str(tmp_path / "base"), str(tmp_path / verb), "-k", multipliers, "--quiet", *more]
        assert main(arguments) == 0
    exact, stored = (load_file(tmp_path / verb / "model.safetensors") for verb in ("grow", "upscale"))
    moved = {name for name in stored if not torch.equal(stored[name], exact[name])}
    assert {name.split(".")[-2] for name in moved} == noisy
    table = "model.embed_tokens.weight"
    assert torch.equal(stored[table][5], exact[table][5])
    assert torch.equal(stored[table][6], exact[table][6]) is (table not in moved), "control: another row"
    config = transformers.LlamaConfig.from_pretrained(tmp_path / "upscale")
    plan, _ = read_plans(tmp_path / "upscale")
    live = mu.upscale(
        base, lambda: transformers.LlamaForCausalLM(config), mu.SignalNoise(0.2), seed=3, plan=plan
    )
    named = dict(live.model.named_parameters())
    assert all(torch.equal(stored[name], named[name]) for name in stored)


def test_a_plan_comes_from_a_process_of_its_own(base):
    command = [sys.executable, "-m", "mupscale.cli.main", "plan", str(base), "-k", "2", "--tensors"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "num_key_value_heads" in done.stdout
    assert "model.layers.*.self_attn.q_proj.weight" in done.stdout
    assert "5 AdamW steps" in done.stdout


def test_check_holds_at_every_level(base, wide, tmp_path, capsys):
    words = ["check", str(wide), "--base", str(base), "--levels", "bytes,layout,model", "--quiet"]
    assert main([*words, "--json", str(tmp_path / "check.json")]) == 0
    told = json.loads((tmp_path / "check.json").read_text())
    assert [(level["level"], level["holds"]) for level in told["levels"]] == [
        (x, True) for x in ("bytes", "layout", "model")
    ]
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()] == [
        [x, "holds:"] for x in ("bytes", "layout", "model")
    ]


def test_check_of_a_noisy_directory_holds_and_another_seed_does_not(base, noisy, tmp_path, capsys):
    assert main(["check", str(noisy), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0
    other = tmp_path / "noisy"
    shutil.copytree(noisy, other)
    told = json.loads((other / "mupscale.json").read_text())
    told["noise"]["seed"] = 4
    (other / "mupscale.json").write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    assert main(["check", str(other), "--base", str(base), "--levels", "bytes", "--quiet"]) == 1
    assert "model.embed_tokens.weight" in capsys.readouterr().out


def test_a_result_is_checked_without_its_base(wide, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(wide, copy)
    assert main(["check", str(copy), "--quiet", "--threads", "2"]) == 0
    assert "files   holds" in capsys.readouterr().out
    path = copy / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert main(["check", str(copy), "--quiet"]) == 1
    assert "model.safetensors" in capsys.readouterr().out
    assert main(["check", str(copy), "--levels", "layout"]) == 2, "the layout needs the base"
    assert main(["check", str(copy), "--threads", "0"]) == 2


def test_the_model_level_does_not_apply_to_noise(base, noisy, wide, capsys):
    assert main(["check", str(noisy), "--base", str(base), "--levels", "bytes,model", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "model   not applicable: noise has moved the model" in said
    assert main(["check", str(wide), "--base", str(base), "--levels", "bytes,model", "--quiet"]) == 0
    assert "model   holds" in capsys.readouterr().out, "control: without noise it is compared"


def test_a_level_that_fails_is_not_hidden_by_one_that_does_not_apply(base, noisy, tmp_path, capsys):
    """Control: the exit status is that of the levels that apply."""
    other = tmp_path / "other"
    shutil.copytree(noisy, other)
    (other / "README.md").write_text("another card\n")
    assert main(["check", str(other), "--base", str(base), "--levels", "bytes,model", "--quiet"]) == 1


def test_a_trusted_base_and_an_output_inside_its_base(base, tmp_path, capsys):
    assert main(["grow", str(base), str(base / "wide"), "-k", "2"]) == 2
    assert "[job.output_inside_base]" in capsys.readouterr().err
    out = tmp_path / "trusted"
    assert main(["grow", str(base), str(out), "-k", "2", "--trust-base", "--quiet"]) == 0
    told = json.loads((out / "mupscale.json").read_text())
    assert told["base"]["read"] == "once"
    assert told["request"]["trust_base"] is True
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0


def test_folders_above_the_result_are_made(base, tmp_path):
    out = tmp_path / "some" / "where" / "wide"
    assert main(["grow", str(base), str(out), "-k", "2", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == [], "control: not by a dry run"
    assert main(["grow", str(base), str(out), "-k", "2", "--quiet", "--threads", "1"]) == 0
    assert (out / "config.json").exists()


@pytest.mark.parametrize(
    "words",
    ["grow", "upscale", "upscale --by copies --noise t=0.1 --no-loss", "upscale --by copies --noise auto"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_nothing_is_published(base, tmp_path, words, value, capsys):
    broken, name = tmp_path / "broken", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(base, broken)
    weights = load_file(base / "model.safetensors")
    weights[name][3, 4] = value
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    verb, *more = words.split()
    assert main([verb, str(broken), str(tmp_path / "w"), "-k", "2", "--quiet", *more]) == 2
    said = capsys.readouterr().err
    assert f"{name} [model.weight_not_finite]" in said
    assert not (tmp_path / "w").exists()
    if verb == "grow":
        assert main([verb, str(base), str(tmp_path / "other"), "-k", "2", "--quiet", *more]) == 0, (
            "the remedy"
        )


def test_buffers_may_be_infinite():
    entries = {"mask": {"kind": "buffer"}, "weight": {}}
    moves: Any = [
        SimpleNamespace(name=name, target=SimpleNamespace(file="model.safetensors")) for name in entries
    ]
    assert finite_moves(moves, {"plan": {"tensors": entries}}) == {"weight"}


def test_a_dry_run_writes_nothing(base, tmp_path, capsys):
    assert cli("upscale", base, tmp_path / "w", "-k 2 --noise sigma=0.1 --dry-run") == 0
    assert "nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    told = tmp_path / "told.json"
    assert cli("upscale", base, tmp_path / "w", f"-k 2 --noise sigma=0.1 --dry-run --json {told}") == 0
    found = json.loads(told.read_text())
    assert (found["outcome"], found["noise"]["kind"]) == ("dry run", "MupNoise")


def test_a_grown_model_that_was_saved_without_its_record_is_recognised(wide, tmp_path, capsys):
    import mupscale as mu

    again = tmp_path / "again"
    transformers.LlamaForCausalLM.from_pretrained(wide).save_pretrained(again)
    assert not (again / "mupscale.json").exists()
    grow = ["upscale", str(again), str(tmp_path / "w"), "-k", "2", "--noise", "t=0.1", "--dry-run"]
    for arguments in (["plan", str(again), "-k", "2"], grow):
        assert main(arguments) == 2
        assert "[growth.record_lost]" in capsys.readouterr().err
    make = lambda: transformers.LlamaForCausalLM.from_pretrained(wide)  # noqa: E731
    with refused("growth.record_missing", where=str(again)):
        mu.trainers.optimizer_in_units(make(), again, torch.optim.AdamW, lr=1e-3)
    told = json.loads((again / "config.json").read_text())
    shutil.copy(wide / "mupscale.json", again)
    assert main(grow) == 0, "the first remedy works"
    (again / "mupscale.json").unlink()
    (again / "config.json").write_text(json.dumps({k: v for k, v in told.items() if k != "mupscale"}))
    assert main(grow) == 0, "the second remedy works, and is the control: without the mark nothing is known"


def test_growing_twice_counts_from_the_first_reference(base, wide, tmp_path):
    import mupscale as mu

    again = tmp_path / "again"
    assert main(["grow", str(wide), str(again), "-k", "2", "--quiet", "--threads", "1"]) == 0
    plan, since = read_plans(again)
    before, history = (mu.diagnostics.read_provenance(folder) for folder in (wide, again))
    assert history.growths[:-1] == before.growths
    assert (history["plan"], history["reference"]) == (plan.hash, read_plans(wide)[1].hash)
    assert plan["model.layers.0.mlp.up_proj.weight"].base_shape == (80, 64)
    assert since["model.layers.0.mlp.up_proj.weight"].base_shape == (40, 32)
    assert difference(logits(again), logits(base)) < SINGLE


def test_rounding_is_told_and_advised_upon(base, tmp_path, capsys):
    arguments = ["upscale", str(base), str(tmp_path / "w"), "-k", "2", "--dtype", "bfloat16", "--dry-run"]
    assert main([*arguments, "--noise", "sigma=1e-4"]) == 0
    assert "float32 masters" in capsys.readouterr().out
    assert main([*arguments, "--noise", "sigma=0.5"]) == 0
    assert "float32 masters" not in capsys.readouterr().out


BF16 = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 97}, 2),
    "llama": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}, 2),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}, 2),
    "gemma3_text": ("Gemma3ForCausalLM", {**SIZES, "head_dim": 16}, 4),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 97}, 4),
}  # fmt: skip
"""Families whose scales are powers of two at this k; the control is k = 3, where they are not."""


@pytest.mark.parametrize(
    "kind", [pytest.param(n, marks=pytest.mark.nightly) if n == "gemma3_text" else n for n in BF16]
)
def test_bf16_at_a_power_of_two_loses_no_bit(kind, tmp_path):
    name, sizes, k = BF16[kind]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(transformers.AutoConfig.for_model(kind, **sizes)).to(torch.bfloat16).save_pretrained(
        tmp_path / "base"
    )
    inputs = {"input_ids": torch.arange(3, 23)[None]}
    if kind == "t5":
        inputs["decoder_input_ids"] = torch.arange(3, 13)[None]

    @torch.no_grad()
    def outputs(folder, arithmetic):
        model = cls.from_pretrained(folder, dtype=torch.bfloat16).eval().to(arithmetic)
        with lifted_casts() if arithmetic == torch.float64 else nullcontext():
            return model(**inputs).logits.bfloat16()

    def differ(folder, arithmetic):
        return float((outputs(folder, arithmetic) != outputs(tmp_path / "base", arithmetic)).float().mean())

    for multiplier in (k, 3):
        arguments = [str(tmp_path / "base"), str(tmp_path / f"x{multiplier}"), "-k", str(multiplier)]
        assert main(["grow", *arguments, "--quiet", "--threads", "1"]) == 0
    assert differ(tmp_path / f"x{k}", torch.float64) == 0 < 0.2 < differ(tmp_path / "x3", torch.float64)
    assert differ(tmp_path / f"x{k}", torch.bfloat16) < 0.1 < 0.5 < differ(tmp_path / "x3", torch.bfloat16)


def test_a_batch_shows_what_noise_costs(base, tmp_path, capsys):
    batch = tmp_path / "batch.json"
    batch.write_text(json.dumps({"input_ids": [list(range(16))]}))
    out = tmp_path / "w"
    assert cli("upscale", base, out, "-k 2 --noise sigma=0.3 --quiet --inputs", batch) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("loss of"))
    before, after = (float(line.split()[i]) for i in (3, 8))
    assert before != after


@pytest.fixture(scope="module")
def stateful(planned_here, tmp_path_factory):
    """A Trainer's directory, with AdamW state, and what growing it with noise gives."""
    from mupscale.checkpoints.state.trainer_state import trainer_order

    folder = tmp_path_factory.mktemp("stateful")
    model = save_llama(folder / "base")
    named = dict(model.named_parameters())
    decayed, bare = ([named[name] for name in names] for names in trainer_order(model, {}))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]
    )
    model(input_ids=torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "base" / "optimizer.pt")
    assert cli("upscale", folder / "base", folder / "wide", "-k 2 --noise t=0.2 --quiet") == 0
    return folder / "base", folder / "wide"


@pytest.mark.parametrize("seed", range(4))
def test_single_bit_flips_are_caught_and_named(stateful, tmp_path, seed, capsys):
    """100 flips in all, in weights, optimizer state, configuration and record; the unchanged directory holds."""
    base, wide = stateful
    generator = torch.Generator().manual_seed(seed)
    job = job_again(Base(base), wide, read_record(wide))
    copy = tmp_path / "wide"
    shutil.copytree(wide, copy)
    files = ["model.safetensors"] * 10 + ["optimizer.pt"] * 10 + ["config.json"] * 3
    for name in [*files, "mupscale.json", "generation_config.json"]:
        raw = bytearray((wide / name).read_bytes())
        at = int(torch.randint(len(raw), (), generator=generator))
        raw[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        (copy / name).write_bytes(raw)
        status = main(["check", str(copy), "--base", str(base), "--levels", "bytes", "--quiet"])
        said = capsys.readouterr()
        assert status in (1, 2), (name, at)
        assert _named(job, name, at) in said.out + said.err, (name, at, said)
        (copy / name).write_bytes((wide / name).read_bytes())
    assert main(["check", str(copy), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0


def _named(job, file, at):
    """The tensor whose bytes lie there, or the file where no tensor does."""
    places = ((move.name, move.target) for move in job.moves)
    return next((name for name, p in places if p.file == file and p.offset <= at < p.end), file)


def test_another_base_in_the_place_of_a_finished_one_is_no_success(stateful, tmp_path, capsys):
    base, wide = stateful
    other = tmp_path / "base"
    shutil.copytree(base, other)
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    assert main(["upscale", str(other), str(wide), "-k", "2", "--noise", "t=0.2", "--quiet"]) == 2
    assert "[job.output_not_empty]" in capsys.readouterr().err


def test_kv_heads_can_stay(base, tmp_path):
    out = tmp_path / "wide"
    assert cli("grow", base, out, "-k hidden=2,heads=2,ffn=3,kv_heads=1 --quiet --threads 1") == 0
    config = json.loads((out / "config.json").read_text())
    found = [config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
    assert found == [8, 2, 120]
    assert difference(logits(out), logits(base)) < SINGLE


def test_a_granite_export_shows_its_multiplier(base, tmp_path):
    out = tmp_path / "granite"
    assert cli("grow", base, out, "-k 2 --export granite --quiet --threads 1") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    assert type(model).__name__ == "GraniteForCausalLM"
    assert model.config.logits_scaling == 2
    want, found = logits(base), model(input_ids=torch.arange(20)[None]).logits.detach()
    assert difference(found, want) < SINGLE


def test_other_arguments_do_not_resume(base, tmp_path, capsys):
    out = tmp_path / "wide"
    command = [sys.executable, *["-m", "mupscale.cli.main", "grow"], str(base), str(out)]
    command += ["-k", "2", "--share", "0/2"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert not out.exists()
    assert main(["grow", str(base), str(out), "-k", "2", "--dtype", "bfloat16", "--quiet"]) == 2
    assert "dtype [job.other_arguments]" in capsys.readouterr().err
    assert main(["grow", str(base), str(out), "-k", "2", "--share", "1/2", "--quiet"]) == 0
    assert (out / "config.json").exists()


def test_the_threads_of_a_share_read_the_job_once(base, tmp_path, monkeypatch):
    """One process writes the share of a node, so a job with many tensors is parsed once there."""
    out, parsed, threads = tmp_path / "wide", [], []
    assert main(["grow", str(base), str(out), "-k", "2", "--share", "0/2", "--quiet"]) == 0

    def parse(raw, what, **limits):
        parsed.append(what)
        return parse_json(raw, what, **limits)

    def in_threads(count, *rest):
        threads.append(count)
        real(count, *rest)

    real = run_in_threads
    monkeypatch.setattr(worker, "in_threads", in_threads)
    for module in (job_module, partial):
        monkeypatch.setattr(module, "parse_json", parse)
    assert main(["grow", str(base), str(out), "-k", "2", "--share", "1/2", "--threads", "3", "--quiet"]) == 0
    assert (out / "config.json").exists()
    assert (parsed, threads) == (["the job"], [3])


def test_growing_again_draws_other_noise_for_the_same_seed(base, tmp_path):
    """Control: the same numbers added twice would correlate perfectly."""
    first, second = tmp_path / "first", tmp_path / "second"
    noise = "--noise sigma=0.1 --quiet"
    assert cli("upscale", base, first, "-k hidden=2,heads=2,kv_heads=2", noise) == 0
    assert cli("upscale", first, second, "-k ffn=2", noise) == 0
    name = "model.layers.0.mlp.up_proj.weight"
    b, one, two = (load_file(folder / "model.safetensors")[name] for folder in (base, first, second))
    plans = [read_plans(folder)[0] for folder in (first, second)]
    from mupscale.tensors.expand import expand

    early = one - expand(b, plans[0][name].making())
    late = (two - expand(one, plans[1][name].making()))[: len(early)]  # rows of one length: the same elements
    assert float(early.abs().min()) > 0, "the tensor has noise"
    assert abs(float(torch.corrcoef(torch.stack([early.flatten(), late.flatten()]))[0, 1])) < 0.1


def test_a_base_may_be_renamed_but_not_reconfigured(base, wide, tmp_path, capsys):
    copy = tmp_path / "another name"
    shutil.copytree(base, copy)
    assert main(["check", str(wide), "--base", str(copy), "--levels", "bytes", "--quiet"]) == 0
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    capsys.readouterr()
    assert main(["check", str(wide), "--base", str(copy), "--quiet"]) == 1
    said = capsys.readouterr().out
    assert "bytes   FAILS" in said
    assert "config.json: rms_norm_eps" in said


def test_running_a_finished_command_again_is_no_error(base, wide, capsys):
    before = (wide / "model.safetensors").stat().st_mtime_ns
    assert main(["grow", str(base), str(wide), "-k", "2", "--quiet"]) == 0
    assert "already complete" in capsys.readouterr().out
    assert (wide / "model.safetensors").stat().st_mtime_ns == before


def test_a_moved_partial_directory_is_finished_where_it_lies(base, tmp_path, monkeypatch):
    assert main(["grow", str(base), str(tmp_path / "a"), "-k", "2", "--share", "0/3", "--quiet"]) == 0
    (tmp_path / "in").mkdir()
    (tmp_path / "a.partial").rename(tmp_path / "in" / "b.partial")
    monkeypatch.chdir(tmp_path / "in")
    assert main(["grow", str(base), "../in/b", "-k", "2", "--quiet"]) == 0
    assert (tmp_path / "in" / "b" / "config.json").exists()
    assert not (tmp_path / "a").exists()


def test_a_plan_of_a_grown_directory_counts_from_the_reference(wide, capsys):
    assert main(["plan", str(wide), "-k", "2"]) == 0
    assert "1/4" in capsys.readouterr().out

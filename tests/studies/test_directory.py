"""A study from a Hugging Face directory: the pair that is made of it, the text it reads, and what it refuses."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mupscale as mu
from harness.refusals import refused
from mupscale.cli.main import main
from mupscale.families.config.narrow import proxy_width
from mupscale.families.models import as_data
from mupscale.plans.backward import backward
from mupscale.studies.agenda.outlook import Outlook
from mupscale.studies.command import read_command
from mupscale.studies.directory.proxy import StockFamily, Trained
from mupscale.studies.directory.study import DEFAULTS, directory_study
from mupscale.studies.directory.text import HELD, PASSES, TextData, check_enough, read_text
from mupscale.studies.report.known import know
from mupscale.studies.report.verdict import verdicts
from mupscale.training.recipe import Recipe

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "vocab_size": 32, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
QUICK = ["--steps", "12", "--batch", "4", "--context", "16", "--lrs", "0.01,0.02", "--noises", "0.1"]
QUICK += ["--factors", "1", "--extend", "0", "--no-report"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("directory") / "base"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Tokens that count up from a random one: a model learns them in a few steps."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    starts = torch.randint(32, (400,), generator=torch.Generator().manual_seed(0))
    rows = [[int(start + i) % 32 for i in range(16)] for start in starts]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def tuned(base: Path, text: Path, folder: Path, *more: str) -> Recipe:
    assert (
        main(["tune", str(base), "--data", str(text), *QUICK, "--folder", str(folder), "--quiet", *more]) == 0
    )
    return Recipe.read(folder / "recipe.json")


@pytest.fixture(scope="module")
def study(base, text, tmp_path_factory):
    """The folder of a study that was not disturbed."""
    folder = tmp_path_factory.mktemp("study") / "study"
    tuned(base, text, folder)
    return folder


def words_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 32)}}
    made: Any = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def test_the_proxy_is_the_same_model_narrower():
    family = StockFamily(CONFIG)
    small, own, grown = (family.config_at(width) for width in (8, 16, 24))
    assert as_data(own) == as_data(family.config)
    assert (small.hidden_size, small.num_attention_heads, small.intermediate_size) == (8, 1, 12)
    assert (grown.hidden_size, grown.num_attention_heads, grown.head_dim) == (24, 3, own.head_dim)
    assert proxy_width(family.config) == 8
    with refused("proxy.no_such_width", where="--width"):
        family.config_at(4)


def test_the_way_back_is_in_the_units_of_the_way_there():
    """From the wide end back to the base and there again nothing changes. Control: with a fold left out it does."""
    family = StockFamily(CONFIG)
    plan = family.plan(8, 16)
    back = family.plan(16, 8)
    there_again = back.then(plan)
    assert all(str(entry.change.s) == "1" and entry.change.c == 1 for entry in there_again.tensors.values())
    assert back.proved
    lost = {name: replace(entry, fold=type(entry.fold)()) for name, entry in back.tensors.items()}
    wrong = replace(back, tensors=lost).then(plan)
    assert str(wrong["model.norm.weight"].change.s) == "1/2", "the tied readout's fold"


def test_a_plan_with_new_tensors_has_no_way_back():
    plan = StockFamily(CONFIG).plan(8, 16)
    name, entry = next(iter(plan.tensors.items()))
    with refused("plan.not_a_copy", where=name):
        backward(replace(plan, tensors={**plan.tensors, name: replace(entry, sources=())}))


@pytest.mark.parametrize(
    ("config", "code", "named"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "proxy.not_a_language_model", "BertModel"),
        ({"model_type": "t5"}, "proxy.not_a_language_model", "T5ForConditionalGeneration"),
        ({"model_type": "vit"}, "proxy.not_a_language_model", "ViTForImageClassification"),
        ({"model_type": "no_such_type"}, "config.unknown_model_type", "no_such_type"),
    ],
)
def test_a_type_without_a_language_model_head_is_refused(config, code, named):
    with refused(code, where=named):
        StockFamily(config)


def test_an_encoder_is_refused_although_it_has_a_language_model_head():
    """Its loss sees the tokens that it should predict. Control: the same class as a decoder is accepted."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 1}
    bert = {"model_type": "bert", "architectures": ["BertLMHeadModel"], "vocab_size": 32, **sizes}
    with refused("proxy.looks_ahead", where="bert"):
        StockFamily(bert)
    StockFamily({**bert, "is_decoder": True})


def test_text_is_read_by_the_model_s_own_tokenizer(base, tmp_path):
    """Texts and one plain text give the same sequences as their tokens do."""
    words_tokenizer(tmp_path)
    tokens = [int(i) for i in torch.randint(2, 32, (400,), generator=torch.Generator().manual_seed(1))]
    said = " ".join(f"w{i}" for i in tokens)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": said}) + "\n\n")
    (tmp_path / "b.txt").write_text(said)
    (tmp_path / "c.jsonl").write_text(json.dumps({"input_ids": [*tokens, 1]}) + "\n")
    found = [
        read_text(tmp_path / name, tmp_path, words=32, length=16, most=99)
        for name in ("a.jsonl", "b.txt", "c.jsonl")
    ]
    assert len({data.digest for data in found}) == 1
    assert (len(found[0].train), len(found[0].held)) == (25 - HELD, HELD)
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [*tokens[1:], 1, 1]}) + "\n")
    other = read_text(tmp_path / "d.jsonl", tmp_path, words=32, length=16, most=99)
    assert other.digest != found[0].digest, "control: another text"


@pytest.mark.parametrize(
    ("name", "content", "code", "named"),
    [
        ("none.jsonl", None, "data.no_such_file", "none.jsonl"),
        ("a.jsonl", '{"text": "w2 w3"}\n', "data.no_tokenizer", "tokenizer.json"),
        ("b.jsonl", "{\n", "data.line_not_json", "b.jsonl, line 1"),
        ("c.jsonl", '{"body": "w2"}\n', "data.line_without_text", "c.jsonl, line 1"),
        ("d.jsonl", '{"input_ids": [1, 32]}\n', "data.unknown_token", "32"),
        ("e.jsonl", '{"input_ids": [1, 2, 3]}\n', "data.too_few_sequences", "16"),
        ("f.txt", b"\xff\xfe\x00", "data.not_utf8_text", "f.txt"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(name, content, code, named, base, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(code, where=named):
        read_text(tmp_path / name, base, words=32, length=16, most=99)


def test_each_sequence_is_seen_once_in_a_pass_and_at_most_four_times(tmp_path):
    data = TextData(torch.arange(12).view(12, 1), torch.zeros(1, 1))
    passes = [[int(row) for step in range(4 * n, 4 * n + 4) for row in data.batch(step, 3)] for n in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(12))
    assert passes[0] != passes[1]
    assert torch.equal(data.batch(2, 3), data.batch(2, 3)), "a function of the step"
    check_enough(data, tmp_path, PASSES * 12)
    with refused("data.repeated_too_often", where=str(tmp_path)):
        check_enough(data, tmp_path, PASSES * 12 + 1)


def test_a_text_that_is_too_short_for_the_runs_is_refused(base, text):
    given = {"steps": 400}
    with refused("data.repeated_too_often", where=str(text)):
        directory_study(base, text, given, context=16, batch=4)
    directory_study(base, text, {"steps": 20}, context=16, batch=4)  # control


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(base, text, tmp_path, capsys):
    folder = tmp_path / "study"
    command = ["tune", str(base), "--data", str(text), *QUICK, "--folder", str(folder)]
    assert main([*command, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "width 8 -> 16 (k = 2), constants written at width 16" in told
    assert "FLOPs" in told
    assert "dry run: nothing was trained or written" in told
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "--data [option.not_given]"),
        (["--context", "1"], "--context [option.below_least]"),
        (["--context", "99"], "--context [data.sequences_too_long]"),
        (["--width", "5"], "--width [proxy.no_such_width]"),
    ],
)
def test_a_wrong_option_is_refused(words, fault, base, text, capsys):
    data = ["--data", str(text)] if words else []
    assert main(["tune", str(base), *data, *words]) == 2
    assert fault in capsys.readouterr().err


def test_what_only_a_directory_has_is_refused_for_a_file(tmp_path, capsys):
    path = tmp_path / "proxy.py"
    path.write_text("")
    assert main(["tune", str(path), "--data", "text.jsonl", "--width", "8"]) == 2
    told = capsys.readouterr().err
    assert "--data [option.said_elsewhere]" in told
    assert "-k [option.not_given]" in told


@pytest.mark.nightly
def test_a_directory_is_tuned_and_grown_by_the_recipe(base, text, study, tmp_path, capsys, monkeypatch):
    """Also: a study that is stopped continues, and gives the recipe of one that was not."""
    whole = Recipe.read(study / "recipe.json")
    train, left = Trained.train, [20]

    def stopping(self, run, steps, report):
        def counting(step, loss):
            report(step, loss)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        train(self, run, steps, counting)

    command = [
        "tune", str(base), "--data", str(text), *QUICK, "--folder", str(tmp_path / "stopped"), "--quiet",
    ]  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(Trained, "train", stopping)
        assert main([*command, "--every", "0"]) == 130
    assert not (tmp_path / "stopped" / "recipe.json").exists()
    tuned(base, text, tmp_path / "stopped")
    recipes = [(folder / "recipe.json").read_bytes() for folder in (study, tmp_path / "stopped")]
    assert recipes[0] == recipes[1]
    assert (whole.k, whole.reference, whole.width, whole.optimizer) == (2, 16, 8, "torch.optim.AdamW")
    assert set(whole.stay) == {"going on", "from scratch"}
    assert any("growing" in remark for remark in whole.remarks)
    capsys.readouterr()

    rising = replace(whole, sigma=None, rise=0.1)
    rising.save(tmp_path / "rising.json")
    rows = [json.loads(line)["input_ids"] for line in text.read_text().splitlines()[:8]]
    (tmp_path / "batch.json").write_text(json.dumps({"input_ids": rows}))
    trained = learned(base, tmp_path / "trained", rows)
    grow = [
        "upscale", str(trained), str(tmp_path / "wide"), "-k", "2", "--recipe",
        str(tmp_path / "rising.json"),
    ]  # fmt: skip
    assert main([*grow, "--inputs", str(tmp_path / "batch.json"), "--quiet"]) == 0
    told = capsys.readouterr().out
    assert f"lr={whole.lr:g} (at the reference)" in told
    about = json.loads((tmp_path / "wide" / "mupscale.json").read_text())
    auto = about["noise"]["auto"]
    assert auto["found"] == pytest.approx(0.1, rel=0.2), "the rise that the recipe asks for"
    assert about["noise"]["asked"]["lr"] == whole.lr
    assert main([*grow[:2], str(tmp_path / "x3"), "-k", "3", *grow[5:], "--quiet"]) == 2
    assert "[recipe.other_growth]" in capsys.readouterr().err, "control: another k"


def learned(base: Path, folder: Path, rows: list[list[int]]) -> Path:
    """The base after a few steps on a batch, so that there is something that noise can cost."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(base)
    ids = torch.tensor(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_the_recipe_holds_for_a_base_that_was_grown_itself(base, text, study, tmp_path, capsys):
    """Its reference is the directory that was tuned. Control: a wider model of its own has another reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe = Recipe.read(study / "recipe.json")
    replace(recipe, sigma=0.01, rise=None).save(tmp_path / "recipe.json")
    with_recipe = ["-k", "2", "--recipe", str(tmp_path / "recipe.json"), "--no-loss", "--quiet"]
    assert main(["grow", str(base), str(tmp_path / "x2"), "-k", "2", "--quiet"]) == 0
    with refused("proxy.directory_was_grown", where=str(tmp_path / "x2")):
        directory_study(tmp_path / "x2", text, {})
    assert main(["upscale", str(tmp_path / "x2"), str(tmp_path / "x4"), *with_recipe]) == 0
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 4})).save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert main(["upscale", str(tmp_path / "other"), str(tmp_path / "no"), *with_recipe]) == 2
    assert "[recipe.other_reference]" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_commands_of_a_verdict_on_a_directory_are_accepted(base, study):
    """Control: with another text option they would not be those of this study."""
    [verdict], command = verdicts([know(study)]), read_command(study, "mupscale")
    assert command is not None
    assert {"--batch": "4", "--context": "16"}.items() <= command.options.items()
    use = command.applied(study, 2)
    for line in [*verdict.commands[:2], use]:
        assert main([*shlex.split(line)[1:], "--dry-run"]) == 0, line
    assert main([*shlex.split(use.replace("-k 2", "-k 4"))[1:], "--dry-run"]) == 2


@pytest.mark.nightly
def test_what_a_dry_run_counts_is_what_is_trained(base, text, tmp_path):
    study = directory_study(
        base, text, {**DEFAULTS, "steps": 12, "lrs": [0.01], "extend": 0}, context=16, batch=4
    )
    recipe = mu.tune(study.proxy, study.settings, folder=tmp_path)
    look = Outlook.of(study.settings.for_proxy(study.proxy))
    assert recipe.cost == {"base_width_steps": look.narrow, "wide_steps": look.wide}

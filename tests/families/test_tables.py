"""More words and positions in stock models: the plan is exact on a small copy, in files, and what cannot be is refused."""

import json
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness.refusals import refused  # noqa: E402
from harness.tiny_llama import LLAMA, SIZES, TOKENS, cli, same_bits, saved  # noqa: E402
from mupscale.families.config.multipliers import To, parse_to  # noqa: E402
from mupscale.families.models import config_from, factory, model_class  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.families.prove import prove  # noqa: E402
from mupscale.families.record import FamilyPlan  # noqa: E402
from mupscale.families.steps.words import more_of  # noqa: E402

BERT = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, **TOKENS}


def test_the_two_spellings_of_words():
    assert parse_to("vocab=+64").vocab == "+64"
    data = {"model_type": "x", "vocab_size": 512}
    assert more_of(data, To(0, vocab="+64")) == more_of(data, To(0, vocab="576"))
    with refused("goal.size_not_larger", where=("512", "500")):
        more_of(data, To(0, vocab="500"))
    with refused("goal.rows_not_counted_once", where="positions"):
        more_of(data, To(0, positions=64))
    for text in ("vocab=+0", "vocab=-3", "vocab=1e3", "positions=+9"):
        with refused("goal.to_not_readable", where=text):
            parse_to(text)


@pytest.mark.parametrize(
    ("config", "k", "to"),
    [
        ({**LLAMA, "tie_word_embeddings": True}, 1, "vocab=+64"),
        ({**LLAMA, "tie_word_embeddings": True}, "ffn=2", "vocab=+64,positions=128,hidden=48,layers=3,after=0"),
        ({"model_type": "phi", **BERT}, 1, "vocab=130"),  # a readout with a bias
        ({"model_type": "gemma2", **SIZES}, 2, "vocab=+31"),  # logits with a cap
        (GPT2, 1, "vocab=+3,positions=96"),
        ({"model_type": "bert", **BERT, "architectures": ["BertForMaskedLM"]}, 2, "vocab=+64,positions=96"),
    ],
    ids=["llama", "llama, all", "phi", "gemma2", "gpt2", "bert"],
)  # fmt: skip
def test_the_small_copy_continues_its_base(config, k, to):
    family = prove(family_plan(config, k, to=to), steps=3)
    assert family.evidence.worst_step < 1e-11 < 1e-3 < family.evidence.control
    if k == 1:
        assert family.evidence.worst_step < 1e-15
    assert FamilyPlan.from_json(family.to_json()) == family
    first, end = family.new_words or (0, 0)
    assert (first, end) == (97, family.wide_config["vocab_size"])
    assert any("logits[..., :97]" in note for note in family.notes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_gets_words_and_loads_in_the_stock_class(tmp_path, capsys, tied):
    base, ends = saved(tmp_path / "base", tie_word_embeddings=tied), (tmp_path / "base", tmp_path / "wide")
    assert cli("grow", *ends, "--to vocab=+64,layers=3,after=0") == 0
    said = capsys.readouterr().out
    assert "new words: ids 97 to 160" in said
    assert "over all 161 words" in said
    assert cli("check", ends[1], "--base", ends[0], "--levels", "bytes,layout,model") == 0
    wide = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide").eval()
    assert wide.config.vocab_size == 161
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        logits = wide(words).logits
        assert torch.equal(logits[..., :97], base(words).logits)
        assert not bool(logits[..., 97:].any())
    told = json.loads((tmp_path / "wide" / "mupscale.json").read_text())["words"]
    assert told["ids"] == [97, 161]
    losses = told["losses"]
    assert losses["all"] - losses["old"] == pytest.approx(losses["expected"], abs=2e-3)
    card = (tmp_path / "wide" / "README.md").read_text()
    assert "Ids 97 to 160 are new words" in card
    assert "logits[..., :97]" in card


def test_noise_wakes_words_as_their_mean_and_files_equal_the_live_bits(tmp_path):
    base, ends = saved(tmp_path / "base"), (tmp_path / "base", tmp_path / "wide")
    to = "vocab=+64,hidden=48"
    assert cli("upscale", *ends, f"-k ffn=2 --to {to} --noise t=0.1 --no-loss --quiet") == 0
    assert cli("check", ends[1], "--base", ends[0], "--levels", "bytes") == 0
    family = family_plan(tmp_path / "base", "ffn=2", to=to)
    make = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**family.wide_config))  # noqa: E731
    live = mu.upscale(base, make, mu.SignalNoise(0.1), plan=family.plan).model
    stored = same_bits(tmp_path / "wide", live)
    head, table = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    torch.testing.assert_close(
        head[97:, :32], base.lm_head.weight.mean(0).expand(64, -1), rtol=1e-5, atol=1e-7
    )
    assert bool(head[97:, 32:].all()), "what reads the new units wakes for new words too"
    assert not bool(table[97:, 32:].any()), "what writes into them stays zero"
    assert bool(table[97:, :32].all())


def test_every_new_word_that_is_seen_learns_from_the_first_step_on():
    family = family_plan(LLAMA, to="vocab=+8")
    config, wide = config_from(family.base_config), config_from(family.wide_config)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    awake: Any = mu.upscale(
        base, lambda: transformers.LlamaForCausalLM(wide), mu.SignalNoise(0.1), plan=family.plan
    ).model
    words = torch.arange(45, 105).repeat(2, 1)
    awake(input_ids=words, labels=words).loss.backward()
    for table in (awake.model.embed_tokens, awake.lm_head):
        assert bool((table.weight.grad[97:104] != 0).all())


def test_tables_of_positions_are_longer_in_files(tmp_path):
    base = saved(tmp_path / "base", "GPT2", **{k: v for k, v in GPT2.items() if k != "model_type"})
    ends = (tmp_path / "base", tmp_path / "wide")
    assert cli("upscale", *ends, "--to positions=96 --noise t=0.1 --no-loss --quiet") == 0
    wide = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "wide").eval()
    assert wide.config.n_positions == 96
    assert not bool(wide.transformer.wpe.weight[64:].any())
    words = torch.randint(0, 97, (1, 96))
    with torch.no_grad():
        assert torch.equal(wide(words[:, :64]).logits, base(words[:, :64]).logits)
    wide(words, labels=words).loss.backward()
    assert bool((wide.transformer.wpe.weight.grad[64:95] != 0).all()), "longer texts train them"


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_rotary_positions_are_the_bases_up_to_its_length(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, **({"factor": 2.0} if kind == "dynamic" else {})}
    family = family_plan({**LLAMA, "rope_parameters": rope}, to="positions=128")
    assert family.wide_config["max_position_embeddings"] == 128
    assert not any(entry.grows for entry in family.plan.tensors.values())
    ends = [config_from(config) for config in (family.base_config, family.wide_config)]
    torch.manual_seed(0)
    base, wide = (factory(model_class(config))(config).eval() for config in ends)
    wide.load_state_dict(base.state_dict())
    words = torch.randint(0, 97, (1, 100))
    with torch.no_grad():
        assert torch.equal(wide(words[:, :64]).logits, base(words[:, :64]).logits)
        later = torch.equal(wide(words).logits, base(words).logits)
    assert later is (kind == "default"), (
        "a dynamic rope stretches from the length that the configuration names"
    )


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "linear": (
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "positions=128",
        "family.rope_depends_on_length",
    ),
    "yarn": ({**LLAMA, "rope_parameters": YARN}, "positions=128", "family.rope_depends_on_length"),
    "llama3": ({**LLAMA, "rope_parameters": LLAMA3}, "positions=128", "family.rope_depends_on_length"),
    "alibi": (
        {"model_type": "falcon", **BERT, "alibi": True, "new_decoder_architecture": True},
        "positions=128",
        "family.positions_are_distances",
    ),
    "bloom": (
        {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
        "positions=128",
        "goal.rows_not_counted_once",
    ),
    "padding": ({**LLAMA, "pad_token_id": -1}, "vocab=+8", "words.padding_row_moves"),
}


@pytest.mark.parametrize(("config", "to", "code"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_another_function_is_refused(config, to, code):
    with refused(code) as caught:
        family_plan(config, to=to)
    assert all(fault.remedy for fault in caught.value.faults)


def test_the_remedy_for_a_stretched_rope_holds():
    """Longer sequences run as they are, and everything else can grow."""
    config = {**LLAMA, "rope_parameters": YARN}
    assert family_plan(config, to="vocab=+8").plan.proved
    model = factory(model_class(config_from(config)))(config_from(config)).eval()
    with torch.no_grad():
        assert bool(model(torch.randint(0, 97, (1, 100))).logits.isfinite().all())

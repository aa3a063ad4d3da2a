"""Next steps of a grown directory name what works on it."""

from pathlib import Path
from typing import Any

import pytest

from mupscale.cli.printing.next_steps import next_steps
from mupscale.files.directory import TOKENIZERS
from mupscale.jobs.job import Carried, Job, Text


def told(architecture: str, *carried: str, more: Any = None, **config: Any) -> str:
    """What is said of a directory of this class, with these files of its base, and more in its record."""
    about = {
        "architecture": architecture,
        "parameters": {"wide": 1},
        "noise": {"asked": {}},
        "config": config,
        **(more or {}),
    }
    base, out = Path("base"), Path("wide")
    files = tuple(Carried(name, 1, "") for name in carried)
    return next_steps(
        base, out, Job(base, out, (), (), (), carried=files, texts=(Text("train.py", ""),), about=about)
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_evaluation_on_text_is_named_for_a_decoder_with_a_tokenizer(name):
    assert "  lm_eval --model hf --model_args pretrained=wide " in told("LlamaForCausalLM", name)
    assert "lm_eval" in told("GPT2LMHeadModel", "generation_config.json", name)


def test_no_evaluation_is_named_for_what_it_cannot_be_run_on():
    """Without a tokenizer, for an encoder, and for a decoder that needs an encoder's input."""
    assert "lm_eval" not in told("LlamaForCausalLM")
    assert "lm_eval" not in told("LlamaForCausalLM", "generation_config.json")
    assert "lm_eval" not in told("BertForMaskedLM", "tokenizer.json")
    assert "lm_eval" not in told("BartForCausalLM", "tokenizer.json", is_encoder_decoder=True)


def test_the_data_and_the_class_are_those_of_the_kind():
    assert "--data text.jsonl" in told("LlamaForCausalLM")
    assert "--data images.safetensors" in told("ViTForImageClassification")
    sentences = told("BertModel", more={"sentence_transformers": True})
    assert "--data pairs.jsonl" in sentences
    assert 'sentence_transformers.SentenceTransformer("wide")' in sentences
    assert "lr=2e-05" in sentences
    assert "--data" not in told("BertModel"), "control: without modules it has no loss"


def test_new_words_are_given_to_the_tokenizer_by_what_is_printed(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(8)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    said = told("LlamaForCausalLM", more={"words": {"ids": [8, 10], "losses": None}})
    lines = [line.strip() for line in said.splitlines() if "tokenizer" in line and line.startswith("  ")]
    names: dict[str, Any] = {"transformers": transformers}
    exec("\n".join(lines).replace('"wide"', repr(str(tmp_path))).replace("…", '"second new word"'), names)
    assert names["tokenizer"].convert_tokens_to_ids(["first new word", "second new word"]) == [8, 9]
    assert "add_tokens" not in told("LlamaForCausalLM"), "control"

"""Next steps of a grown directory name what works on it."""

from pathlib import Path
from typing import Any

import pytest

from mupscale.cli.printing.next_steps import next_steps
from mupscale.files.directory import TOKENIZERS
from mupscale.jobs.job import Carried, Job


def told(architecture: str, *carried: str, **config: Any) -> str:
    """What is said of a directory of this class, with these files of its base."""
    about = {
        "architecture": architecture,
        "parameters": {"wide": 1},
        "noise": {"asked": {}},
        "config": config,
    }
    base, out = Path("base"), Path("wide")
    files = tuple(Carried(name, 1, "") for name in carried)
    return next_steps(base, out, Job(base, out, (), (), (), carried=files, about=about))


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

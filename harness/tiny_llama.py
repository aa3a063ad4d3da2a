"""A Llama of two narrow layers, as a model and as a directory, and the command line called with few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from mupscale.cli.main import main

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
TOKENS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def new(kind: str = "Llama", **fields: Any) -> Any:
    """A causal model of a stock class, always with the same random weights, and biases that are not zero."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_()
    return model


def saved(folder: Path, kind: str = "Llama", **changes: Any) -> Any:
    """A model in evaluation mode that also lies in `folder`; a Llama has the sizes above where nothing else is given."""
    model = new(kind, **({**SIZES, **changes} if kind != "GPT2" else changes))
    model.save_pretrained(folder)
    return model.eval()


def cli(*words: str | Path) -> int:
    """The exit code of a command: text is split at blanks, paths are single words."""
    return main([part for word in words for part in (word.split() if isinstance(word, str) else [str(word)])])


def same_bits(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The tensors stored in `folder`, which must be the parameters of `model`, bit for bit."""
    stored, live = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    assert stored.keys() == live.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, live[name]), name
    return stored

"""Models of Hugging Face's transformers in the zoo, at toy sizes, with dropout off; heads stay fixed or grow."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from harness.data import CLASSES
from harness.zoo.attention import DOWN, UP
from harness.zoo.batches import generator, pictures
from harness.zoo.entry import Batch, Entry, Exact, Open

WORDS, LONGEST = 64, 16
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def sentences(number: int) -> tuple[Tensor]:
    return (torch.randint(5, WORDS, (3, 9), generator=generator(number)),)


def judged(number: int) -> tuple[Tensor, Tensor]:
    g = generator(number)
    return torch.randint(5, WORDS, (3, 9), generator=g), torch.randint(CLASSES, (3,), generator=g)


def language(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[-1]).loss
    return loss


def looking(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(pixel_values=batch[0], labels=batch[1]).loss
    return loss


def built(kind: str, head: str, **options: Any) -> nn.Module:
    """A model of a kind such as "Llama" with a head such as "ForCausalLM"."""
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{kind}Config")(**options)
    made: nn.Module = getattr(transformers, f"{kind}{head}")(config).to(torch.get_default_dtype())
    return made.train()


def shaped(
    kind: str, head: str, heads: int | None = None, kv: bool = False, **options: Any
) -> Callable[[int], nn.Module]:
    """A factory by width, for kinds that use the usual names; heads of size 8 grow unless a number is given."""

    def make(w: int) -> nn.Module:
        count = heads or w // 8
        sizes = {
            "hidden_size": w, "intermediate_size": 2 * w, "num_hidden_layers": 2, "num_attention_heads": count,
            "max_position_embeddings": LONGEST, "vocab_size": WORDS,
        }  # fmt: skip
        shared = {"num_key_value_heads": heads or w // 16} if kv else {}
        return built(kind, head, **{**sizes, **shared, **options})

    return make


def gpt2(heads: int | None = None, dropout: bool = False) -> Callable[[int], nn.Module]:
    off = {} if dropout else GPT2_NO_DROPOUT
    return lambda w: built(
        "GPT2",
        "LMHeadModel",
        n_embd=w,
        n_layer=2,
        n_head=heads or w // 8,
        n_positions=LONGEST,
        vocab_size=WORDS,
        **off,
    )


def t5(heads: int | None) -> Callable[[int], nn.Module]:
    return lambda w: built(
        "T5", "ForConditionalGeneration", d_model=w, d_kv=8, d_ff=2 * w, num_layers=2, num_heads=heads or w // 8,
        dropout_rate=0.0, decoder_start_token_id=0, vocab_size=WORDS,
    )  # fmt: skip


def opt(w: int) -> nn.Module:
    return built(
        "OPT", "ForCausalLM", hidden_size=w, ffn_dim=2 * w, num_hidden_layers=2, num_attention_heads=w // 8, dropout=0.0,
        max_position_embeddings=LONGEST, word_embed_proj_dim=w, vocab_size=WORDS,
    )  # fmt: skip


def mamba(w: int) -> nn.Module:
    return built(
        "Mamba",
        "ForCausalLM",
        hidden_size=w,
        state_size=4,
        num_hidden_layers=2,
        time_step_rank=2,
        vocab_size=WORDS,
    )


def distilbert(w: int) -> nn.Module:
    return built(
        "DistilBert", "ForSequenceClassification", dim=w, hidden_dim=2 * w, n_layers=2, n_heads=w // 8, num_labels=CLASSES,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=LONGEST, vocab_size=WORDS,
    )  # fmt: skip


def entry(name: str, make: Callable[[Any], nn.Module], *rest: Any, base: int = 16, **options: Any) -> Entry:
    given = {"batch": sentences, "objective": language, **options}
    batch = given.pop("batch")
    return Entry(f"hf_{name}", make, base, 2 * base, batch, *rest, **{"needs": "transformers", **given})


GPT2_FIXED = Exact(folds={"*.attn.c_attn.*": DOWN, "*.attn.c_proj.weight": UP})
CLASSIFIES: dict[str, Any] = {"batch": judged}
SEES: dict[str, Any] = {"batch": pictures(16, 4), "objective": looking}
VIT: dict[str, Any] = {"image_size": 16, "patch_size": 8, "num_labels": CLASSES, **NO_DROPOUT}
MODELS = (
    entry("gpt2_heads_fixed", gpt2(2), GPT2_FIXED),
    entry("gpt2_heads_grow", gpt2()),
    entry(
        "llama_heads_fixed",
        shaped("Llama", "ForCausalLM", 2, kv=True),
        Open("new rotary frequencies would sleep between the old"),
    ),
    entry("llama_heads_grow", shaped("Llama", "ForCausalLM", kv=True), base=32),
    entry(
        "llama_tied_heads_grow", shaped("Llama", "ForCausalLM", kv=True, tie_word_embeddings=True), base=32
    ),
    entry("mistral_heads_grow", shaped("Mistral", "ForCausalLM", kv=True), base=32),
    entry("qwen2_heads_grow", shaped("Qwen2", "ForCausalLM", kv=True), base=32),
    entry("qwen3_heads_grow", shaped("Qwen3", "ForCausalLM", kv=True, head_dim=8), base=32),
    entry(
        "gemma2_heads_grow",
        shaped("Gemma2", "ForCausalLM", kv=True, head_dim=8),
        Open("a tied readout, and an embedding times sqrt(width)"),
        base=32,
    ),
    entry("gptneox_heads_grow", shaped("GPTNeoX", "ForCausalLM")),
    entry("phi_heads_grow", shaped("Phi", "ForCausalLM", kv=True, resid_pdrop=0.0), base=32),
    entry("opt_heads_grow", opt),
    entry("mamba", mamba),
    entry("t5_heads_grow", t5(None), inputs=0),
    entry("t5_width_alone", t5(2), inputs=0),
    entry(
        "bert_words_heads_fixed",
        shaped("Bert", "ForMaskedLM", 2, **NO_DROPOUT),
        Exact(folds={"*.self.query.*": DOWN, "*.self.key.*": DOWN}),
    ),
    entry("bert_words_heads_grow", shaped("Bert", "ForMaskedLM", **NO_DROPOUT)),
    entry(
        "bert_classes_heads_grow",
        shaped("Bert", "ForSequenceClassification", num_labels=CLASSES, **NO_DROPOUT),
        **CLASSIFIES,
    ),
    entry("distilbert_heads_grow", distilbert, **CLASSIFIES),
    entry(
        "electra_heads_grow",
        shaped("Electra", "ForSequenceClassification", embedding_size=8, num_labels=CLASSES, **NO_DROPOUT),
        **CLASSIFIES,
    ),
    entry(
        "vit_heads_fixed",
        shaped("ViT", "ForImageClassification", 2, **VIT),
        Exact(folds={"*.q_proj.*": DOWN, "*.k_proj.*": DOWN}),
        **SEES,
    ),
    entry("vit_heads_grow", shaped("ViT", "ForImageClassification", **VIT), **SEES),
    entry("deit_heads_grow", shaped("DeiT", "ForImageClassification", **VIT), **SEES),
)

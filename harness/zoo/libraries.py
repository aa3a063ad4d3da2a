"""Models of timm and x-transformers in the zoo, at toy sizes with dropout off; left out where these are not installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from harness.data import CLASSES, LENGTH, TOKENS, text
from harness.zoo.attention import DOWN, UP
from harness.zoo.batches import pictures
from harness.zoo.entry import Entry, Exact, Open

PATCHES = {"img_size": 16, "patch_size": 8}


def made(name: str, **options: Any) -> nn.Module:
    model: nn.Module = import_module("timm").create_model(name, num_classes=CLASSES, **options)
    return model


def patched(name: str, heads: int | None) -> Callable[[int], nn.Module]:
    """A transformer on patches with two blocks; heads of size 4 grow unless a number is given."""
    return lambda w: made(name, embed_dim=w, depth=2, num_heads=heads or w // 4, **PATCHES)


def staged(name: str) -> Callable[[int], nn.Module]:
    return lambda w: made(name, depths=(1, 1, 1, 1), dims=(w, w, 2 * w, 2 * w))


def decoder(heads: int | None, **options: Any) -> Callable[[int], nn.Module]:
    def make(w: int) -> nn.Module:
        xt = import_module("x_transformers")
        layers = xt.Decoder(dim=w, depth=2, heads=heads or w // 4, attn_dim_head=4, **options)
        model: nn.Module = xt.TransformerWrapper(num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers)
        return model

    return make


def seen(
    name: str, make: Callable[[int], nn.Module], judgement: Exact | Open | None = None, size: int = 16
) -> Entry:
    return Entry(f"timm_{name}", make, 8, 16, pictures(size, 8), judgement or Exact(), needs="timm")


def read(name: str, make: Callable[[int], nn.Module], judgement: Open) -> Entry:
    return Entry(f"xt_{name}", make, 8, 16, text, judgement, needs="x_transformers")


FUSED = {"blocks.*.attn.qkv.*": DOWN, "blocks.*.attn.proj.weight": UP}
LAST = {"blocks_token_only.*.attn.q.*": DOWN, "blocks_token_only.*.attn.k.*": DOWN}
MODELS = (
    seen("vit_heads_fixed", patched("vit_tiny_patch16_224", 2), Exact(folds=FUSED)),
    seen("vit_heads_grow", patched("vit_tiny_patch16_224", None)),
    seen("deit_heads_grow", patched("deit_tiny_distilled_patch16_224", None)),
    seen("beit_heads_grow", patched("beit_base_patch16_224", None)),
    seen("cait_heads_fixed", patched("cait_xxs24_224", 2), Exact(folds={**FUSED, **LAST})),
    seen("xcit_heads_fixed", patched("xcit_nano_12_p16_224", 2), Open("no declarations were found")),
    seen("convnext", staged("convnext_atto"), size=32),
    seen("convnext_v2", staged("convnextv2_atto"), size=32),
    read("decoder", decoder(2), Open("positions are scaled by the width in the call")),
    read(
        "decoder_rotary",
        decoder(None, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True),
        Open("not measured yet"),
    ),
)

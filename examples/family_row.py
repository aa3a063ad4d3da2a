"""A model type that cannot be grown from its configuration alone is given a row, which is tried and proved.

    python examples/family_row.py

MPT weighs keys by their distance (ALiBi), with slopes that depend on the number of heads: heads must stay, head size
grows. Attention then divides by another square root, and k^(1/2) has to go somewhere: half into queries and half into
keys. Values share their tensor, so the output projection takes it back. That is the row, and it belongs into
`src/mupscale/families/types/rows.py`; here it is tried first, next to one with a wrong power.
"""

from dataclasses import replace
from unittest.mock import patch

import torch

import mupscale as mu
from mupscale.families.prove import prove
from mupscale.families.types.rows import ROWS, Row

torch.set_num_threads(1)
CONFIG = {
    "model_type": "mpt",
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 61,
    "max_seq_len": 32,
}

right = Row(
    grows={"hidden": ("d_model",)},
    folds={"*attn.Wqkv.weight": "k^-1/4", "*attn.out_proj.weight": "k^1/4"},
    head_size_grows=True,
)
wrong = replace(right, folds={"*attn.Wqkv.weight": "k^-1/2", "*attn.out_proj.weight": "k^1/2"})

with patch.dict(ROWS, mpt=wrong):
    try:
        mu.plans.family_plan(CONFIG, 2)
    except mu.MupscaleError as error:
        print(f"a wrong power: {error}\n")
    else:
        raise SystemExit("the wrong row was not caught")

with patch.dict(ROWS, mpt=right):
    family = prove(
        mu.plans.family_plan(CONFIG, 2)
    )  # gradients of every tensor, then optimizer steps, on a small copy

seen = family.evidence
print(f"{family.architecture}: d_model {CONFIG['d_model']} -> {family.wide_config['d_model']}")
print(family.plan.explain("transformer.blocks.0.attn.Wqkv.weight"))
print(f"gradients agree to {seen.worst_gradient:.0e}, {seen.steps} AdamW steps to {seen.worst_step:.0e}")
print(f"the same weights with the base's settings: {seen.control:.0e}")
assert seen.worst_gradient < 1e-9
assert seen.worst_step < 1e-9 < 1e-3 < seen.control

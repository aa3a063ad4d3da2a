"""Optimizers that cannot be widened exactly: why, and what to do instead.

Keyed by the name of the class, in whatever package it is, where * stands for any letters; a class of that name with a row
in the table is not refused.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_AFRESH = "grow the weights alone with optimizers=[] and start it afresh"
_MIXED = "so per-tensor units cannot be applied to it"

_REASONS: dict[tuple[str, ...], str] = {
    ("LBFGS",): f"LBFGS mixes all tensors in one inner product, {_MIXED}; {_AFRESH}",
    ("SOAP", "PaLMForeachSOAP", "ForeachSOAP"): (
        "SOAP divides by second moments in the eigenbasis of the gradients. Copies add directions without a gradient, where "
        f"it divides rounding by almost zero, so a float32 run parts from its base within a step; {_AFRESH}"
    ),
    ("Shampoo", "DistributedShampoo", "ScalableShampoo"): (
        "Shampoo takes inverse roots of matrices to which copies add directions without a gradient, where rounding is "
        f"amplified, and cuts tensors in blocks of a fixed size; {_AFRESH}"
    ),
    ("MARS",): (
        "MARS clips the corrected gradient of every tensor at the norm 1, written in its code, and that norm depends on the "
        f"width; {_AFRESH}"
    ),
    ("GaLore", "GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor", "QGaLoreAdamW8bit"): (
        "GaLore keeps its moments in a subspace from a singular value decomposition, whose signs are arbitrary and differ in "
        f"the wide model; {_AFRESH}"
    ),
    ("APOLLO", "APOLLOAdamW", "QAPOLLOAdamW"): (
        f"APOLLO projects gradients at random, and the projection of a wide tensor is another one; {_AFRESH}"
    ),
    ("Dion",): (
        "Dion keeps a fraction of the directions of a matrix, and in the wide model most of that fraction has no gradient; "
        f"{_AFRESH}"
    ),
    (
        "Kron",
        "PSGD",
    ): f"PSGD probes its preconditioner at random, and the probes of a wide tensor are others; {_AFRESH}",
    (
        "Prodigy",
        "ProdigyPlusScheduleFree",
    ): f"Prodigy estimates one step size from sums over all tensors, {_MIXED}; {_AFRESH}",
    ("DAdaptAdam", "DAdaptAdaGrad", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"): (
        f"D-Adaptation estimates one step size from sums over all tensors, {_MIXED}; {_AFRESH}"
    ),
    ("*LAMB*", "*Lamb"): (
        "LAMB clips the norm of the weights at a constant, written in its code, and that norm depends on the width; "
        f"{_AFRESH}"
    ),
    (
        "*LARS*",
        "*Lars",
    ): f"LARS divides norms of weights and of gradients, which depend on the width and on padding; {_AFRESH}",
    ("Sophia", "SophiaG", "SophiaH", "AdaHessian", "Adahessian"): (
        "it uses the diagonal of the Hessian, which is no power of the units of a weight and a gradient; "
        f"{_AFRESH}"
    ),
    ("Lomo", "AdaLomo"): (
        "LOMO changes the weights during the backward pass and keeps no groups that could be in units; train with "
        'optim="adafactor", which keeps about as little state'
    ),
    ("GrokAdamW",): (
        "GrokAdamW clips every tensor at a plain norm, which depends on the width, and its betas depend on the position of a "
        f"tensor in its group; {_AFRESH}"
    ),
    ("LayerWiseDummyOptimizer",): (
        "it stands for one optimizer per tensor, each of which steps during the backward pass; train with "
        'optim="adafactor" or optim="adamw_torch"'
    ),
    ("NpuFusedAdamW",): (
        'its state lies in tensors that join many parameters; train with optim="adamw_torch"'
    ),
}

REFUSED = {name: reason for names, reason in _REASONS.items() for name in names}
"""The name of a class, or a pattern of names -> why it is refused, and what to do."""


def why_refused(name: str) -> str | None:
    """Why the class of this qualified name is refused, or None.

    >>> why_refused("pytorch_optimizer.SOAP").split(".")[0]
    'SOAP divides by second moments in the eigenbasis of the gradients'
    """
    own = name.rpartition(".")[2]
    return next((reason for pattern, reason in REFUSED.items() if fnmatchcase(own, pattern)), None)

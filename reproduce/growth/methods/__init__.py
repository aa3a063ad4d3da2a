"""The ways of growing, one row for each. A new one is a new file here: it is found by its `METHODS`, and nothing else changes.

    METHODS = (
        Method(
            "my_method",                  # what results are stored under; never changed later
            "what the tables call it",
            "arXiv 2601.00001",
            "width",                      # what grows: width, depth, experts, or the experts of a mixture
            make,                         # from a trained base to the wide run: see `method.Growth`
        ),
    )

`python -m reproduce.growth --stage smoke` tries it on made-up data, and `--stage bench --method my_method` trains it from
the stored bases, with a quarter of their FLOPs and with as many again: its rates on the tuning seed, the best one on the
others. `--stage print` lists it beside the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

import mupscale as mu
from mupscale.proofs.identity import Loss

from ...setting import Setting
from ..spec import Spec
from .method import Growth, Method

METHODS: Mapping[str, Method] = {
    method.name: method
    for found in iter_modules(__path__)
    for method in getattr(import_module(f"{__name__}.{found.name}"), "METHODS", ())
}
"""By the name that results are stored under."""


def grow(setting: Setting, base: mu.Run, spec: Spec, steps: int, loss: Loss) -> mu.Run:
    """The wide run of a spec, at its peak rate. `steps` follow, and noise by rule is chosen by this loss."""
    assert spec.start is not None
    mu.set_lr_(base.optimizer, spec.lr)
    return METHODS[spec.method].make(Growth(setting, base, spec, spec.start, steps, loss))

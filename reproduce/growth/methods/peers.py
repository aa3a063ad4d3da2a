"""Published ways to grow in width that the paper's experiments compare too (`reproduce/peers.py`), in mid-schedule."""

from __future__ import annotations

from collections.abc import Callable

import mupscale as mu
from mupscale.training.recipe import TensorGrowth

from ...peers import Start, net2wider, shrink_pad, tiling
from .method import Growth, Method


def as_there(peer: Callable[[Start], mu.Run]) -> Callable[[Growth], mu.Run]:
    """A method of the paper's experiments. It looks at the base and its rates; its recipe has no noise."""

    def make(growth: Growth) -> mu.Run:
        setting, spec, narrow = growth.setting, growth.spec, growth.start.width
        plan = setting.plan(narrow, spec.width)
        recipe = mu.studies.Recipe(
            "torch.optim.AdamW",
            {"lr": spec.lr, "weight_decay": setting.constants["weight_decay"]},
            0.0,
            k=spec.width // narrow,
            tensors=TensorGrowth.all_of(plan, growth.base.since),
            width=narrow,
            reference=setting.reference,
            base_lr=spec.lr,
        )
        start = Start(setting, growth.base, narrow, spec.width // narrow, spec.lr, recipe, spec.seed)
        return peer(start)

    return make


METHODS = (
    Method("tiling", "HyperCloning", "arXiv 2409.12903", "width", as_there(tiling)),
    Method("net2wider", "Net2Wider", "arXiv 1511.05641", "width", as_there(net2wider)),
    Method("shrink_pad", "shrink, pad and perturb", "arXiv 2411.07340", "width", as_there(shrink_pad)),
)

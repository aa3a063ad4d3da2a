"""Growth of a stock model by the plan of its family, as for a checkpoint: wider, deeper, by experts, or by more of them."""

from __future__ import annotations

from typing import Literal

import mupscale as mu
from mupscale.plans import family_plan

from ..settings.stock import SHARED, TOP_K, raw
from ..spec import Spec
from .method import Growth


def grow_by_family(growth: Growth) -> mu.Run:
    """The run that the family's plan makes; what sleeps is woken."""
    spec, start = growth.spec, growth.start
    k, to = goal(start, spec)
    by_units = spec.method in ("new_units", "copied_readers") and spec.width != start.width
    by: Literal["copies", "units"] = "units" if start.experts or by_units else "copies"
    plan = family_plan(raw(start.width, start.layers, start.experts), k, to=to, by=by).plan
    noise: mu.SignalNoise | mu.NewUnits | None = mu.SignalNoise(spec.noise)
    if start.experts:
        noise = None
    elif by_units or spec.layers != start.layers:
        noise = mu.NewUnits("copied" if spec.method == "copied_readers" else "random")
    run = mu.upscale(growth.base, lambda: growth.setting.build(spec.width), noise, plan=plan, seed=spec.seed)
    if spec.state == "empty":
        run.optimizer.state.clear()
    return run


def goal(base: Spec, wide: Spec) -> tuple[int | str, str | None]:
    """What `-k` and `--to` of the command line would say.

    >>> goal(Spec(32, 1, 1.0, 0, layers=2), Spec(48, 1, 1.0, 0, layers=2))
    (1, 'hidden=48,heads=3,kv_heads=3,ffn=144')
    """
    if base.experts and wide.top_k > TOP_K:
        return f"experts={wide.experts // base.experts}", None
    if base.experts:
        return 1, f"experts={wide.experts}"
    if wide.experts:
        ffn = raw(wide.width, wide.layers, SHARED)["intermediate_size"]
        return 1, f"experts={SHARED},top_k={TOP_K},expert_ffn={ffn},into=granitemoeshared"
    if wide.layers != base.layers and wide.method == "copied_readers":
        return 1, f"layers={wide.layers}"
    if wide.layers != base.layers:
        each = wide.layers // base.layers - 1
        places = [str(block) for block in range(base.layers) for _ in range(each)]
        return 1, f"layers={wide.layers},after={':'.join(places)}"
    if wide.width % base.width == 0:
        return wide.width // base.width, None
    sizes = raw(wide.width, wide.layers)
    heads, ffn = sizes["num_attention_heads"], sizes["intermediate_size"]
    return 1, f"hidden={wide.width},heads={heads},kv_heads={heads},ffn={ffn}"

"""Growth in one direction, from a finished Llama: ours by a plan, and what others do with the same weights.

The others begin with an empty optimizer, as they are published; the schedule warms up again for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

import mupscale as mu
from mupscale.plans import family_plan
from mupscale.proofs.identity import Loss

from ..frontier.spec import Method, Spec
from ..setting import Setting
from .models import SHARED, TOP_K, raw

WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")

State = dict[str, Tensor]


def grow(setting: Setting, base: mu.Run, spec: Spec, steps: int, loss: Loss) -> mu.Run:
    """The wide run at the peak rate of the spec."""
    del steps, loss
    assert spec.start is not None
    if spec.method in OTHERS:
        run = setting.fresh(spec.width, spec.lr, spec.seed)
        made = OTHERS[spec.method](dict(base.model.state_dict()), spec.start, spec, run.model.state_dict())
        run.model.load_state_dict(made)
        return run
    mu.set_lr_(base.optimizer, spec.lr)
    k, to = goal(spec.start, spec)
    if spec.start.experts:
        base_config = raw(spec.start.width, spec.start.layers, spec.start.experts)
        plan = family_plan(base_config, k, to=to, by="units").plan
        return mu.upscale(base, lambda: setting.build(spec.width), plan=plan, seed=spec.seed)
    plan = family_plan(raw(spec.start.width, spec.start.layers), k, to=to).plan
    noise: mu.SignalNoise | mu.NewUnits = mu.SignalNoise(spec.noise)
    if spec.layers != spec.start.layers:
        noise = mu.NewUnits("copied" if spec.method == "copied_readers" else "random")
    return mu.upscale(base, lambda: setting.build(spec.width), noise, plan=plan, seed=spec.seed)


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


def _copied_blocks(state: State, base: Spec, wide: Spec, source: Callable[[int], int]) -> State:
    """The state of a deeper model whose block i is block source(i) of the base."""
    made = {name: value for name, value in state.items() if ".layers." not in name}
    for block in range(wide.layers):
        start, end = f"model.layers.{source(block)}.", f"model.layers.{block}."
        made |= {
            end + name.removeprefix(start): value for name, value in state.items() if name.startswith(start)
        }
    return made


def llama_pro(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """Behind every block of the base a copy of it that writes nothing yet (LLaMA Pro, arXiv 2401.02415)."""
    del fresh
    each = wide.layers // base.layers
    made = _copied_blocks(state, base, wide, lambda block: block // each)
    for block in range(wide.layers):
        if block % each:
            made |= {
                name: torch.zeros_like(made[name])
                for name in (f"model.layers.{block}.{writer}" for writer in WRITERS)
            }
    return made


def stack(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """All blocks of the base on top of all blocks of the base (G_stack, arXiv 2405.15319)."""
    del fresh
    return _copied_blocks(state, base, wide, lambda block: block % base.layers)


def stack_third(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """As G_stack, with a third of what the new blocks write."""
    new = range(base.layers, wide.layers)
    return _with_writers(stack(state, base, wide, fresh), new, _THIRD)


def interposed(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """Behind every block of the base its copy (interposition, arXiv 2510.08008)."""
    del fresh
    return _copied_blocks(state, base, wide, lambda block: block // (wide.layers // base.layers))


def half_steps(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """Behind every block its copy, where every block writes half: a step of an equation in two (arXiv 1710.10348)."""
    made = interposed(state, base, wide, fresh)
    return _with_writers(made, range(wide.layers), base.layers / wide.layers)


def _with_writers(state: State, blocks: Iterable[int], factor: float) -> State:
    """The same, where what these blocks write is multiplied by a factor."""
    names = [f"model.layers.{block}.{writer}" for block in blocks for writer in WRITERS]
    return {**state, **{name: factor * state[name] for name in names}}


def upcycling(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """Every expert is a copy of the dense layer, behind a random router (sparse upcycling, arXiv 2212.05055)."""
    made = {name: state.get(name, value) for name, value in fresh.items()}
    for name, value in state.items():
        block, inside, part = name.partition(".mlp.")
        if not inside:
            continue
        if part == "gate_proj.weight":
            joined = torch.cat([value, state[f"{block}.mlp.up_proj.weight"]])
            made[f"{block}.mlp.experts.gate_up_proj"] = torch.stack([joined] * wide.experts)
        elif part == "down_proj.weight":
            made[f"{block}.mlp.experts.down_proj"] = torch.stack([value] * wide.experts)
    return made


def expert_upcycling(state: State, base: Spec, wide: Spec, fresh: State) -> State:
    """Every expert twice, and routers whose rows part by a thousandth of noise (Expert Upcycling, arXiv 2604.19835)."""
    made = {}
    generator = torch.Generator().manual_seed(wide.seed)
    for name, value in state.items():
        copies = value.shape and value.shape[0] == base.experts and fresh[name].shape[0] == wide.experts
        made[name] = value.repeat_interleave(wide.experts // base.experts, 0) if copies else value
        if copies and value.dim() == 2:
            noise = torch.randn(made[name].shape, generator=generator)
            made[name] = made[name] + _SCORE_NOISE * value.square().mean().sqrt() * noise
    return made


_SCORE_NOISE = 1e-3
_THIRD = 0.3
OTHERS: Mapping[Method, Callable[[State, Spec, Spec, State], State]] = {
    "llama_pro": llama_pro,
    "stack": stack,
    "stack_third": stack_third,
    "half_steps": half_steps,
    "interposed": interposed,
    "upcycling": upcycling,
    "expert_upcycling": expert_upcycling,
}

"""Small tools the tests share: seeded models, comparisons that assert, runs that step, plans gone wrong."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mupscale as mu
from mupscale.plans.names import named_tensors

torch.set_num_threads(1)

Loss = Callable[[nn.Module], Tensor]


def examples(count: int) -> settings:
    """`count` random cases, the same ones in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def seeded(make: Callable[..., nn.Module], *args: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make(*args).double()


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gap(found: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest entry wanted."""
    found, want = found.detach(), want.detach()
    difference = float((found - want).abs().max())
    return difference / float(want.abs().max()) if difference == difference else float("inf")


def assert_close(found: Tensor, want: Tensor, bound: float, what: str = "tensor") -> None:
    assert found.shape == want.shape, what
    assert want.detach().any(), f"{what}: nothing to compare with"
    assert gap(found, want) <= bound, f"{what}: off by {gap(found, want):.1e}"


def assert_bitwise(found: Tensor, want: Tensor, what: str = "tensor") -> None:
    assert found.dtype == want.dtype, what
    assert torch.equal(found, want), f"{what}: not the same bits"


def assert_same_model(found: nn.Module, want: nn.Module) -> None:
    expected = {name: tensor for name, _, tensor in named_tensors(want)}
    tensors = {name: tensor for name, _, tensor in named_tensors(found)}
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert_bitwise(tensor, expected[name], name)


def assert_same_state(found: torch.optim.Optimizer, want: torch.optim.Optimizer) -> None:
    """Equal state, bit for bit, parameter by parameter in the order of the groups."""
    assert want.state, "nothing to compare with"
    pairs = zip(parameters_of(found), parameters_of(want), strict=True)
    for position, (mine, other) in enumerate(pairs):
        assert found.state[mine].keys() == want.state[other].keys()
        for key, value in want.state[other].items():
            assert_bitwise(found.state[mine][key], value, f"{position}.{key}")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def tensors_in(thing: Any) -> Iterable[Tensor]:
    """Every tensor inside nested dicts, lists and tuples."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_in(value)


def train(run: mu.Run, loss: Loss, steps: int, observe: Loss | None = None) -> list[Tensor]:
    """Real optimizer and scheduler steps; what `observe` (or the loss) saw after each of them."""
    seen = []
    for _ in range(steps):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        loss(run.model).backward()
        for optimizer in run.optimizers:
            optimizer.step()
        for scheduler in run.schedulers:
            scheduler.step()
        with torch.no_grad():
            seen.append((observe or loss)(run.model).detach().clone())
    return seen


def drift(base: mu.Run, wide: mu.Run, loss: Loss, steps: int, observe: Loss | None = None) -> float:
    """How far two runs come apart over `steps` steps, relative to what they show."""
    pairs = zip(train(base, loss, steps, observe), train(wide, loss, steps, observe), strict=True)
    gaps = [gap(found, want) for want, found in pairs]
    return max(gaps) if all(g == g for g in gaps) else float("inf")


def copied(base: Tensor, axes: Sequence[mu.Axis]) -> Tensor:
    """dup(base), index by index from the definition of an axis; zero where an index is padding."""
    for dim, axis in enumerate(axes):
        sources = [axis.source(i) for i in range(axis.wide)]
        live = torch.tensor([source is not None for source in sources])
        shape = [-1 if d == dim else 1 for d in range(len(axes))]
        base = base.index_select(dim, torch.tensor([s or 0 for s in sources])) * live.view(shape)
    return base


def gradients(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss(model), list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def identity_error(base: dict[str, Tensor], wide: dict[str, Tensor], plan: mu.Plan, only: str = "") -> float:
    """Gradients against the definition: r · dup(G) on the image and zero off it; of every tensor, or of one."""
    assert base.keys() == wide.keys()
    largest = max(float(g.abs().max()) for g in base.values())
    worst = 0.0
    for name in [only] if only else wide:
        entry = plan[name]
        want = copied(base[entry.sources[0]], entry.axes) * float(entry.change.r)
        size = max(float(want.abs().max()), 1e-5 * largest * float(entry.change.r))
        worst = max(worst, float((wide[name] - want).abs().max()) / size)
    return worst


def mistaken(plan: mu.Plan, name: str) -> mu.Plan:
    """The plan with the first copied axis of one tensor taken for in instead of out, or the reverse."""
    entry = plan[name]
    dim = next(d for d, axis in enumerate(entry.axes) if axis.k > 1)
    axes = list(entry.axes)
    axes[dim] = replace(axes[dim], role="out" if axes[dim].role == "in" else "in")
    return plan.with_tensors({plan.ties.get(name, name): replace(entry, axes=tuple(axes))})


def other_power(plan: mu.Plan, name: str) -> mu.Plan:
    """The plan with the same weights and another power of the width in one tensor's gradient scale."""
    entry = plan[name]
    return plan.with_tensors({plan.ties.get(name, name): replace(entry, spread=entry.change.c)})


def refusal(action: Callable[[], Any], *words: str) -> mu.MupscaleError:
    """The error that `action` raises; it must contain every word, those of the remedy among them."""
    with pytest.raises(mu.MupscaleError) as caught:
        action()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return caught.value


FACTORISATIONS = {
    1: [(1,), (1, 1), (1, 1, 1)],
    2: [(2,), (2, 1), (1, 2), (1, 2, 1)],
    3: [(3,), (3, 1), (1, 3), (1, 3, 1)],
    4: [(4,), (2, 2), (4, 1), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (6, 1), (2, 1, 3)],
}


@st.composite
def axes(draw: Any, size: int = 3, segments: int = 3, pads: bool = True, longest: int = 60) -> mu.Axis:
    """Random axes: up to `segments` products of up to three factors, all parts copied equally often."""
    k = draw(st.sampled_from(sorted(FACTORISATIONS)))
    parts = []
    for _ in range(draw(st.integers(1, segments))):
        ks = draw(st.sampled_from(FACTORISATIONS[k]))
        pad = st.integers(0, 2) if pads and draw(st.booleans()) else st.just(0)
        parts.append([mu.Factor(draw(st.integers(1, size)), Fraction(k), draw(pad)) for k in ks])
    role = draw(st.sampled_from(["in", "out"]))
    axis = mu.Axis.of(*parts, role=role)
    assume(axis.wide <= longest)
    return axis

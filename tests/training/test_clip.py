"""Clipping written at the reference is the same clipping at every width, as functions and as a hook."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.closeness import assert_close
from harness.draws import data, seeded
from harness.refusals import refusal, refused
from mupscale.runs.run import since_of
from mupscale.training.units import clip as clip_module
from mupscale.training.units.clip import grad_norm


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


X, Y = data(16, 3), data(16, 2, seed=2)
PLAN = mu.plans.plan_between(net, 4, 12)
CLIPS: dict[str, Any] = {
    "norm": {"max_norm": 0.1},
    "p = 1": {"max_norm": 0.3, "p": 1.0},
    "p = inf": {"max_norm": 0.03, "p": math.inf},
    "value": {"max_value": 0.02},
    "both": {"max_norm": 0.1, "max_value": 0.02},
}


def fresh(count: int = 1) -> mu.Run:
    """A run with one optimizer, or with SGD for the matrices and AdamW for the rest."""
    model = seeded(net, 4)
    matrices = [p for p in model.parameters() if p.dim() == 2 or count == 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    sgd = torch.optim.SGD(matrices, lr=0.3, momentum=0.9)
    return mu.Run(model, sgd if count == 1 else [sgd, torch.optim.AdamW(rest, lr=0.01, eps=1e-2)])


def hooked(count: int, kind: dict[str, Any]) -> mu.Run:
    run = fresh(count)
    mu.clip_before_step_(run.optimizers, run, **kind)
    return run


def accumulate(run: mu.Run, steps: range, clip: Any = None) -> list[Tensor]:
    """Two backward passes to a step; the outputs before every step."""
    seen = []
    for i in steps:
        run.model.zero_grad()
        seen.append(run.model(X).detach())
        for half in (slice(0, 8), slice(8, 16)):
            ((run.model(X[half]) - Y[half] * (1 + i)).square().sum() / 16).backward()
        if clip is not None:
            clip(run.model)
        for optimizer in run.optimizers:
            optimizer.step()
    return seen


def plain(kind: dict[str, Any]) -> Any:
    """What torch's own functions do with the same settings."""

    def clip(model: nn.Module) -> None:
        if "max_norm" in kind:
            torch.nn.utils.clip_grad_norm_(model.parameters(), kind["max_norm"], kind.get("p", 2.0))
        if "max_value" in kind:
            torch.nn.utils.clip_grad_value_(model.parameters(), kind["max_value"])

    return clip


def largest(found: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))


FIRST, LATER = range(2), range(2, 8)
WAYS: dict[str, Any] = {
    "grow": lambda run: mu.grow(run, lambda: net(12), plan=PLAN),
    "upscale": lambda run: mu.upscale(run, lambda: net(12), mu.MupNoise(0.0), plan=PLAN),
    "twice": lambda run: mu.grow(mu.grow(run, lambda: net(8)), lambda: net(24)),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", CLIPS)
def test_a_clipping_hook_is_plain_clipping_at_the_reference_and_goes_along(kind: str, count: int):
    settings = CLIPS[kind]
    want = accumulate(fresh(count), range(8), plain(settings))
    assert largest(accumulate(hooked(count, settings), range(8)), want) <= 1e-13, "at the reference"
    assert largest(accumulate(fresh(count), range(8)), want) > 1e-3, "control: clipping is active"
    for name, way in WAYS.items():
        run = hooked(count, settings)
        accumulate(run, FIRST)
        assert largest(accumulate(way(run), LATER), want[2:]) <= 1e-12, name
    run = fresh(count)
    accumulate(run, FIRST, plain(settings))
    wrong = accumulate(WAYS["grow"](run), LATER, plain(settings))
    assert largest(wrong, want[2:]) > 1e-6, "control: torch's own clipping at the wide model"


def test_a_hook_remembers_the_reference_norm_and_is_shared_by_the_optimizers_of_a_model():
    base = hooked(2, CLIPS["norm"])
    wide = WAYS["grow"](base)
    norms: list[Any] = []
    for run in (base, wide):
        accumulate(run, range(1))
        hooks: dict[int, Any] = {
            id(h): h for o in run.optimizers for h in o._optimizer_step_pre_hooks.values()
        }
        assert len(hooks) == 1, "one hook, one norm"
        norms.append(next(iter(hooks.values())).last_norm)
    assert_close(norms[1], norms[0], 1e-13)
    assert float(norms[0]) > CLIPS["norm"]["max_norm"]


CLOSED: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "LBFGS, several calls to a step": lambda parameters: torch.optim.LBFGS(
        parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
    ),
}


def closed(run: mu.Run, steps: range, clip: Any = None, *, named: bool = True) -> list[Tensor]:
    """Steps whose gradients are made by a closure; the outputs before every step."""
    seen = []
    for i in steps:
        seen.append(run.model(X).detach())

        def closure(scale: int = 1 + i) -> Any:
            run.model.zero_grad()
            loss: Tensor = (run.model(X) - Y * scale).square().mean()
            loss.backward()
            if clip is not None:
                clip(run.model)
            return loss

        optimizer: Any = run.optimizer
        optimizer.step(closure=closure) if named else optimizer.step(closure)
    return seen


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("which", CLOSED)
def test_gradients_that_a_closure_makes_are_clipped_after_every_call(which: str, kind: str):
    def start(hook: bool) -> mu.Run:
        model = seeded(net, 4)
        run = mu.Run(model, CLOSED[which](model.parameters()))
        if hook:
            mu.clip_before_step_(run.optimizer, run, **CLIPS[kind])
        return run

    want = closed(start(False), range(8), plain(CLIPS[kind]))
    for named in (True, False):
        assert largest(closed(start(True), range(8), named=named), want) <= 1e-12, f"{named=}"
    assert largest(closed(start(False), range(8)), want) > 1e-3, "control: clipping is active"
    if which == "SGD":
        run = start(True)
        closed(run, FIRST)
        assert largest(closed(WAYS["grow"](run), LATER), want[2:]) <= 1e-12


class Pair(nn.Module):
    """A generator and a discriminator, which are trained in turn."""

    def __init__(self, n: int):
        super().__init__()
        self.maker, self.judge = net(n), nn.Sequential(nn.Linear(2, n), nn.Tanh(), nn.Linear(n, 1))


def in_turn(run: mu.Run, steps: range, clip: Any, first: str, *, closure: bool = False) -> list[Tensor]:
    """Both optimizers step, each on gradients of its own; the outputs before every step."""
    seen: list[Tensor] = []
    model: Any = run.model
    losses = {
        "judge": lambda i: (model.judge(model.maker(X).detach()) - model.judge(Y * (1 + i))).square().mean(),
        "maker": lambda i: -100 * model.judge(model.maker(X)).mean(),
    }
    for i in steps:
        seen.append(model.maker(X).detach())
        for part in (first, *(set(losses) - {first})):
            optimizer = run.optimizers[part == "maker"]

            def make(part: str = part, optimizer: Any = optimizer, i: int = i) -> Any:
                optimizer.zero_grad()
                loss = losses[part](i)
                loss.backward()
                if clip is not None:
                    clip(getattr(model, part))
                return loss

            optimizer.step(make) if closure else (make(), optimizer.step())
    return seen


def pair(hook: str) -> mu.Run:
    model = seeded(Pair, 4)
    parts = (model.judge, model.maker)
    run = mu.Run(model, [torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.9) for part in parts])
    for optimizers in {"one": [run.optimizers], "each": run.optimizers, "none": ()}[hook]:
        mu.clip_before_step_(optimizers, run, **CLIPS["norm"])  # type: ignore[arg-type]
    return run


def judged(model: Any) -> Any:
    return model.judge(model.maker(X)).square().mean()


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("hook", ["one", "each"])
def test_optimizers_that_step_in_turn_are_each_clipped_by_their_own_norm(hook: str, closure: bool):
    """Control: without the second clip the steps are others. Optimizers that step together have one norm, above."""
    want = in_turn(pair("none"), range(8), plain(CLIPS["norm"]), "judge")
    found = in_turn(pair(hook), range(8), None, "judge", closure=closure)
    assert largest(found, want) <= 1e-12
    half = in_turn(
        pair("none"), range(8), lambda part: plain(CLIPS["norm"])(part) if len(part) == 3 else None, "judge"
    )
    assert largest(half, want) > 1e-3, "control: the generator is not clipped"
    run = pair(hook)
    in_turn(run, FIRST, None, "judge", closure=closure)
    wide = mu.grow(run, lambda: Pair(12), loss=judged)
    assert largest(in_turn(wide, LATER, None, "judge", closure=closure), want[2:]) <= 1e-12


def test_one_clip_each_is_right_from_the_first_step_in_either_order():
    """In one call, the first step of the generator counts the gradients that its loss leaves in the discriminator."""
    want = in_turn(pair("none"), range(8), plain(CLIPS["norm"]), "maker")
    assert largest(in_turn(pair("each"), range(8), None, "maker"), want) <= 1e-12
    assert largest(in_turn(pair("one"), range(8), None, "maker"), want) > 1e-6, "control"


def test_a_step_that_is_left_out_does_not_part_the_norm():
    """As a scaler leaves out a step with infinite gradients: the next steps have one norm again."""
    want, found = fresh(2), hooked(2, CLIPS["norm"])
    for i in range(4):
        for run in (want, found):
            run.model.zero_grad()
            (run.model(X) - Y * (1 + i)).square().sum().backward()
            if run is want:
                plain(CLIPS["norm"])(run.model)
            for optimizer in run.optimizers[: 1 if i == 1 else 2]:
                optimizer.step()
    assert largest(list(found.model.state_dict().values()), list(want.model.state_dict().values())) <= 1e-13


SCALED: dict[str, Any] = {
    "fused": lambda parameters: [torch.optim.AdamW(parameters, lr=0.01, eps=1e-2, fused=True)],
    "fused, then not": lambda p: [torch.optim.SGD(p[::2], lr=0.3, fused=True), torch.optim.SGD(p[1::2], lr=0.3)],
    "fused second": lambda p: [torch.optim.SGD(p[::2], lr=0.3), torch.optim.SGD(p[1::2], lr=0.3, fused=True)],
    "both fused": lambda p: [torch.optim.SGD(some, lr=0.3, fused=True) for some in (p[::2], p[1::2])],
    "none fused": lambda p: [torch.optim.SGD(some, lr=0.3) for some in (p[::2], p[1::2])],
}  # fmt: skip


def with_scaler(run: mu.Run, scaler: Any, steps: range, unscaled: int, clip: Any = None) -> list[Tensor]:
    """Steps of a scaler. The gradients of the first `unscaled` optimizers are unscaled beforehand."""
    seen = []
    for i in steps:
        run.model.zero_grad()
        seen.append(run.model(X).detach())
        scaler.scale((run.model(X) - Y * (1 + i)).square().mean()).backward()
        for optimizer in run.optimizers[:unscaled]:
            scaler.unscale_(optimizer)
        if clip is not None:
            clip(run.model)
        for optimizer in run.optimizers:
            scaler.step(optimizer)
        scaler.update()
    return seen


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("unscaled", [0, 1, 2])
@pytest.mark.parametrize("which", SCALED)
def test_gradients_that_a_scaler_has_scaled_are_clipped_as_if_it_had_not(
    which: str, unscaled: int, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """The scale grows at every second step. Controls: no clipping, and a hook that does not ask for the scale."""

    def start(hook: bool) -> tuple[mu.Run, Any]:
        model = seeded(net, 4)
        run = mu.Run(model, SCALED[which](list(model.parameters())))
        if hook:
            mu.clip_before_step_(run.optimizers, run, **CLIPS[kind])
        return run, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    want = with_scaler(*start(False), range(8), 2, plain(CLIPS[kind]))
    assert largest(with_scaler(*start(False), range(8), 2), want) > 1e-3, "control: clipping is active"
    run, scaler = start(True)
    first = with_scaler(run, scaler, FIRST, unscaled)
    assert not any(hook.in_turn for hook in run.optimizers[0]._optimizer_step_pre_hooks.values())  # type: ignore[attr-defined]
    wide = WAYS["grow"](run)
    assert largest(first + with_scaler(wide, scaler, LATER, unscaled), want) <= 1e-6
    off = with_scaler(start(True)[0], torch.amp.GradScaler("cpu", enabled=False), range(8), unscaled)
    assert largest(off, want) <= 1e-6, "a scaler that is switched off"
    monkeypatch.setattr(clip_module, "_scales", lambda *_: {})
    wrong = with_scaler(*start(True), range(8), unscaled)
    assert unscaled >= len(run.optimizers) or largest(wrong, want) > 1e-3, "control: scaled gradients"


@pytest.mark.parametrize("kept", [True, False], ids=["same memory", "new memory"])
def test_a_scaler_does_not_hide_that_optimizers_step_in_turn(kept: bool):
    """Gradients in the memory of those that were clipped before are new ones if they changed more than by unscaling."""

    def steps(run: mu.Run, clip: Any, scaler: Any) -> list[Tensor]:
        seen, model = [], run.model
        for i in range(8):
            seen.append(model.maker(X).detach())  # type: ignore[operator]
            for optimizer, sign in zip(run.optimizers, (1, -30), strict=True):
                optimizer.zero_grad(set_to_none=not kept)
                scaler.scale(sign * (judged(model) - i)).backward()
                if clip is not None:
                    scaler.unscale_(optimizer)
                    clip([p for group in optimizer.param_groups for p in group["params"]])
                scaler.step(optimizer)
            scaler.update()
        return seen

    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=1024.0)

    want = steps(pair("none"), lambda own: torch.nn.utils.clip_grad_norm_(own, 0.1), scaler())
    assert largest(steps(pair("each"), None, scaler()), want) <= 1e-6
    assert largest(steps(pair("none"), None, scaler()), want) > 1e-3, "control: clipping is active"
    run = pair("one")
    steps(run, None, scaler())
    hooks: list[Any] = [hook for o in run.optimizers for hook in o._optimizer_step_pre_hooks.values()]
    assert [hook.in_turn for hook in hooks] == [True, True]


def test_a_hook_is_removed_by_its_handles():
    run = fresh(2)
    for handle in mu.clip_before_step_(run.optimizers, run, max_norm=0.1):
        handle.remove()
    assert largest(accumulate(run, range(5)), accumulate(fresh(2), range(5))) == 0.0


def test_a_hook_comes_back_when_a_run_is_narrowed():
    run = hooked(1, CLIPS["norm"])
    accumulate(run, FIRST)
    back = mu.narrow(WAYS["grow"](run), lambda: net(4))
    assert largest(accumulate(back, LATER), accumulate(run, LATER)) <= 1e-12


def test_what_a_hook_cannot_do_is_refused():
    run = fresh()
    refusal(lambda: mu.clip_before_step_(run.optimizers, run), "clip.no_bound")
    other = seeded(net, 4)
    refusal(
        lambda: mu.clip_before_step_(run.optimizers, mu.Run(other), max_norm=1.0),
        "optimizer.foreign_parameters",
    )


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_the_reference_norm_is_equal_at_every_width_and_torchs_is_not(p: float):
    base = seeded(net, 4)
    norms, plain_norms = [], []
    for n in (4, 8, 20):
        plan = mu.plans.plan_between(net, 4, n)
        model = mu.grow(base, partial(net, n), plan=plan).model
        (model(X) - Y).square().mean().backward()
        norms.append(grad_norm(model, plan, p=p))
        plain_norms.append(
            torch.nn.utils.get_total_norm([q.grad for q in model.parameters() if q.grad is not None], p)
        )
    assert_close(torch.stack(norms), norms[0].expand(3), 1e-13)
    assert_close(norms[0], plain_norms[0], 1e-13)
    if p < math.inf:  # the largest gradient may sit in a tensor that does not grow
        assert abs(float(plain_norms[2] / plain_norms[0]) - 1) > 1e-3, "control"


class Words(nn.Module):
    """Embeddings with sparse gradients, of a word that occurs twice."""

    def __init__(self, n: int):
        super().__init__()
        self.word = nn.Embedding(5, n, sparse=True)
        self.context = nn.Embedding(5, n, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = (self.word(words) * self.context(words.flip(0))).sum(-1)
        return scores


@pytest.mark.parametrize("n", [4, 12])
def test_sparse_gradients_are_clipped_by_value_and_by_norm(n: int):
    plan = (
        mu.plans.plan_between(Words, 4, n, declared=mu.Declared(roles={"context.weight": "in"}))
        if n > 4
        else None
    )
    base = seeded(Words, 4)
    with torch.sparse.check_sparse_tensor_invariants():
        run = mu.grow(base, lambda: Words(n), plan=plan, prove=False) if plan else mu.Run(base)
        words = torch.tensor([1, 1, 3])
        run.model(words).square().sum().backward()
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
        mu.clip_before_step_(optimizer, run, max_value=0.01)
        optimizer.step()
        for name, p in run.model.named_parameters():
            bound = 0.01 * float(since_of(run, run.model)[name].change.r)
            assert p.grad is not None
            assert float(p.grad.to_dense().abs().max()) <= bound * (1 + 1e-12), name
        run.model.zero_grad()
        run.model(words).square().sum().backward()
        assert mu.trainers.clip_grad_norm_(run.model, run, max_norm=0.01) > 0.01
        assert abs(float(grad_norm(run.model, run)) / 0.01 - 1) <= 1e-4


def test_the_order_of_torchs_own_function_is_refused():
    run = fresh()
    with refused("argument.wrong_type", where="1.0"):
        mu.trainers.clip_grad_norm_(run.model, 1.0, max_norm=run)  # type: ignore[arg-type]


def test_an_infinite_bound_clips_nothing_where_the_norm_overflows():
    """Control: a finite bound cannot scale by an infinite norm, and sets all gradients to 0."""
    run, huge = fresh(), 1e200  # its square is above the largest number
    for bound, left in ((math.inf, huge), (1.0, 0.0)):
        for parameter in run.model.parameters():
            parameter.grad = torch.full_like(parameter, huge)
        norm = mu.trainers.clip_grad_norm_(run.model, run, max_norm=bound)
        assert norm == math.inf
        assert all(
            torch.equal(p.grad, torch.full_like(p, left))
            for p in run.model.parameters()
            if p.grad is not None
        )

"""A multilayer perceptron with any activation as a program: trained by SGD, grown, trained further.

Knows: forward, backward and update in the units of a reference of width one, where every layer has the one rate
and μP's powers of the width are 1. `mupscale.plans.plan_between(make, 1, n)` puts a real model into the same units. No
biases, one output; SGD without momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from mupscale.errors import Fault, raise_faults

from .program import Backend, Vector
from .schedule import Schedule
from .weights import Weight, step

Activation = Callable[[Tensor], Tensor]


def mlp(
    backend: Backend,
    schedule: Schedule,
    *,
    inputs: Sequence[Sequence[float]],
    targets: Sequence[float],
    sigma: Sequence[float],
    noise: Sequence[float],
    activation: Activation | None = torch.tanh,
    slope: Callable[[float, float], float] = lambda output, target: output - target,
    batches: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Train, grow, continue training: the output for every input at every step, before that step's update.

    `sigma` and `noise` hold one size σ̄ for each layer, first to last, and so fix the depth. `slope` is the
    derivative of a sample's loss by its output, by default of (output - target)²/2; a step follows the mean over
    all samples, or over `batches[t]`. `activation` None leaves the network linear.

    >>> from reproduce.limits import SampledKets
    >>> settings = dict(inputs=[[1.0], [-0.5]], targets=[1.0, 0.5], sigma=[1, 1, 1], noise=[0.2, 0.2, 0.2])
    >>> outputs = mlp(SampledKets(k=2, samples=2**10), Schedule(steps=3, grow_at=2, rate=0.5), **settings)
    >>> [round(y, 1) for y in outputs[2]]
    [0.2, -0.1]
    """
    _check(schedule, inputs, targets, sigma, noise, batches)
    features, last = len(inputs[0]), len(sigma) - 1
    first = [backend.vector(f"layer 0, {j}", "duplicated", sigma[0]) for j in range(features)]
    hidden = [Weight(backend, backend.matrix(f"layer {i}", "duplicated", sigma[i])) for i in range(1, last)]
    readout = backend.vector(f"layer {last}", "duplicated", sigma[last])
    act, bend = _act(backend, activation), _bend(backend, activation)
    everything: list[list[float]] = []
    for t, rate in enumerate(schedule.rates()):
        if t == schedule.grow_at:
            first = [
                u + backend.vector(f"noise of layer 0, {j}", "noise", noise[0]) for j, u in enumerate(first)
            ]
            for i, weight in enumerate(hidden, 1):
                weight.grow(backend.matrix(f"noise of layer {i}", "noise", noise[i]))
            readout = readout + backend.vector(f"noise of layer {last}", "noise", noise[last])
        passes = []
        for x in inputs:
            before = [backend.combine(list(x), first)]
            after = [act(before[0])]
            for weight in hidden:
                before.append(weight.times(after[-1]))
                after.append(act(before[-1]))
            passes.append((before, after))
        outputs = [backend.dot(readout, after[-1]) for _, after in passes]
        everything.append(outputs)
        chosen = range(len(inputs)) if batches is None else batches[t]
        sizes = [-rate * slope(outputs[p], targets[p]) / len(chosen) for p in chosen]
        if not rate or t == schedule.steps - 1:
            continue
        backwards = []  # of all samples before any update: a gradient is taken at one point
        for p in chosen:
            before, _ = passes[p]
            signals = [bend(readout, before[-1])]
            for weight, h in zip(reversed(hidden), reversed(before[:-1]), strict=True):
                signals.append(bend(weight.times(signals[-1], transpose=True), h))
            backwards.append(signals[::-1])
        for size, p, signals in zip(sizes, chosen, backwards, strict=True):
            for weight, signal, below in zip(hidden, signals[1:], passes[p][1][:-1], strict=True):
                weight.add_update(size, signal, below)
        first = [
            step(
                backend,
                u,
                [size * inputs[p][j] for size, p in zip(sizes, chosen, strict=True)],
                [s[0] for s in backwards],
            )
            for j, u in enumerate(first)
        ]
        readout = step(backend, readout, sizes, [passes[p][1][-1] for p in chosen])
    return everything


def _act(backend: Backend, activation: Activation | None) -> Callable[[Vector], Vector]:
    return (lambda h: h) if activation is None else (lambda h: backend.apply(activation, h))


def _bend(backend: Backend, activation: Activation | None) -> Callable[[Vector, Vector], Vector]:
    """A backward signal through the activation, whose derivative is what autograd says it is."""
    if activation is None:
        return lambda signal, h: signal

    def times_derivative(signal: Tensor, h: Tensor) -> Tensor:
        with torch.enable_grad():
            at = h.detach().requires_grad_()
            (derivative,) = torch.autograd.grad(activation(at).sum(), at)
        return signal * derivative

    return lambda signal, h: backend.apply(times_derivative, signal, h)


def _check(
    schedule: Schedule,
    inputs: Sequence[Sequence[float]],
    targets: Sequence[float],
    sigma: Sequence[float],
    noise: Sequence[float],
    batches: Sequence[Sequence[int]] | None,
) -> None:
    faults = [
        Fault(
            "limits.one_size_for_layers",
            name,
            f"it is {sizes!r}, expected one size for each layer",
            f"write {name}=[{sizes!r}, {sizes!r}], for example",
        )
        for name, sizes in (("sigma", sigma), ("noise", noise))
        if isinstance(sizes, Real)
    ]
    raise_faults("this network cannot be run", faults)
    if len(sigma) < 2:
        faults.append(
            Fault(
                "limits.too_few_layers",
                "sigma",
                f"{len(sigma)} sizes",
                "write one for each layer, at least two",
            )
        )
    if len(noise) != len(sigma):
        what = f"{len(noise)} sizes for {len(sigma)} layers"
        faults.append(
            Fault("limits.noise_unlike_layers", "noise", what, "write one for each layer; 0 for none")
        )
    if not inputs or len(inputs) != len(targets):
        faults.append(
            Fault(
                "limits.targets_unlike_inputs",
                "targets",
                f"{len(targets)} for {len(inputs)} inputs",
                "write one for each",
            )
        )
    if any(len(a) != len(b) for a, b in pairwise(inputs)):
        faults.append(
            Fault(
                "limits.inputs_differ_in_length",
                "inputs",
                "their lengths differ",
                "write as many numbers for each",
            )
        )
    if batches is not None and len(batches) != schedule.steps:
        what = f"{len(batches)} for {schedule.steps} steps"
        faults.append(Fault("limits.batches_unlike_steps", "batches", what, "write the samples of each step"))
    if any(not batch or not set(batch) <= set(range(len(inputs))) for batch in batches or ()):
        remedy = f"write at least one number from 0 to {len(inputs) - 1} for each step"
        faults.append(
            Fault(
                "limits.batch_not_of_inputs",
                "batches",
                "a step without samples, or with one that is not there",
                remedy,
            )
        )
    raise_faults("this network cannot be run", faults)

"""What an experiment will take before it is started: runs, steps, FLOPs, time on this machine, memory.

Knows sizes and clocks. Trains nothing but a few steps, to see how long they take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.errors import Fault, raise_faults
from mupscale.studies.agenda.grid import Point, points_of
from mupscale.studies.agenda.halving import Ladder
from mupscale.studies.settings import RUNGS

from .data import DATA
from .setting import Setting
from .stages import Experiment

EXTENDED = 1.25
"""Points that are added beyond an edge, as a rule."""


@dataclass(frozen=True)
class Item:
    """One line of the plan: so many runs of so many steps at a width."""

    what: str
    runs: float
    width: int
    steps: int

    @property
    def total(self) -> float:
        return self.runs * self.steps


def items(experiment: Experiment) -> list[Item]:
    """Everything that an experiment trains."""
    scale = experiment.scale
    ladder = Ladder.of(scale.steps, RUNGS, 0.5)

    def runs(points: list[Point]) -> float:
        """How many full runs a sweep over these points is worth."""
        return EXTENDED * ladder.steps_for(points) / scale.steps

    found = [Item("sweep 1", runs(points_of(scale.lrs, [None])), scale.proxy, scale.steps)]
    for noises, what in ((scale.noises, "sweep 2"), (scale.paired, "sweep 2, paired noise")):
        if noises:
            points = points_of(scale.factors, noises)
            found.append(Item(what, runs(points), scale.k * scale.proxy, scale.steps))
    for name in dict.fromkeys(job.method for job in experiment.jobs()):
        jobs = [job for job in experiment.jobs() if job.method == name]
        found.append(Item(name.replace("_", " "), len(jobs), jobs[0].width, jobs[0].steps))
    return found


def seconds_of(setting: Setting, width: int, steps: int = 3) -> float:
    """Processor time of one step on this machine; others who work on it do not count."""
    run = setting.fresh(width, 1e-4, 0)
    setting.step(run, 0, 0)
    began = process_time()
    for step in range(1, 1 + steps):
        setting.step(run, step, 0)
    return (process_time() - began) / steps


def memory_of(setting: Setting, width: int) -> float:
    """About how many bytes training takes: weights, gradients, optimizer state, outputs of all modules once."""
    model = mu.plans.on_meta(lambda: setting.build(width)).to("meta")
    state = 2 if issubclass(setting.optimizer, torch.optim.AdamW) else 1
    parameters = sum(p.numel() for p in model.parameters())
    seen: list[int] = []

    def count(module: nn.Module, _: Any, out: Any) -> None:
        if not list(module.children()) and isinstance(out, Tensor):
            seen.append(out.numel())

    for module in model.modules():
        module.register_forward_hook(count)
    assert setting.inputs is not None
    with torch.no_grad(), torch.device("meta"):
        model(setting.inputs().to("meta"))
    return 4.0 * (parameters * (2 + state) + sum(seen))


def tell(experiments: Iterable[Experiment], timed: bool) -> float:
    """Print the plan; the hours on one core of this machine, where steps are timed."""
    hours = 0.0
    for experiment in experiments:
        setting, scale = experiment.setting, experiment.scale
        print(
            f"\n{setting.name}: tuned on {scale.proxy} -> {scale.k * scale.proxy}, grown {scale.base} -> {scale.wide}, "
            f"constants at width {setting.reference}, {setting.optimizer.__name__}, batch {setting.batch * setting.parts}"
        )
        print(f"  {'':24}{'runs':>6}{'width':>8}{'steps':>9}{'TFLOPs':>14}{'hours':>8}")
        lines = items(experiment)
        seconds = {w: seconds_of(setting, w) for w in {line.width for line in lines}} if timed else {}
        for line in lines:
            flops = line.total * setting.flops(line.width) / 1e12
            spent = line.total * seconds[line.width] / 3600 if timed else 0.0
            hours += spent
            took = f"{spent:8.2f}" if timed else f"{'':>8}"
            print(f"  {line.what:24}{line.runs:6.1f}{line.width:8}{line.steps:9}{flops:14,.1f}{took}")
        for name, why in experiment.refused().items():
            print(f"  {name.replace('_', ' ')}: left out, {why}")
        print(f"  memory of the widest run: about {memory_of(setting, scale.wide) / 2**30:.1f} GB")
    return hours


def check_hardware(experiments: Iterable[Experiment]) -> None:
    """Raise, with everything that is missing, unless this machine can run what is asked for."""
    faults = []
    for experiment in experiments:
        if not experiment.scale.device.startswith("cuda"):
            continue
        need = memory_of(experiment.setting, experiment.scale.wide)
        if not torch.cuda.is_available():
            what = "a CUDA device, and there is none"
            faults.append(Fault(experiment.setting.name, what, "run it where there is one, or --scale here"))
        elif torch.cuda.get_device_properties(0).total_memory < need:
            what = f"a device with {need / 2**30:.0f} GB, and this one has less"
            faults.append(
                Fault(experiment.setting.name, what, "use a larger one, or a smaller batch with more parts")
            )
    faults += _missing_data(experiments)
    raise_faults("this machine lacks what the experiment needs", list(dict.fromkeys(faults)))


def _missing_data(experiments: Iterable[Experiment]) -> list[Fault]:
    faults = []
    wanted = (("dataset", "cifar100", "images/cifar100.npz"), ("source", "fineweb", "text/fineweb.u2"))
    for experiment in experiments:
        for key, value, file in wanted:
            there = (DATA / file).is_file() or find_spec("datasets") is not None
            if experiment.scale.sizes.get(key) == value and not there:
                what = f"{value} is not at {DATA / file}, and datasets is not installed"
                faults.append(Fault("data", what, "put it there, or pip install datasets to fetch it"))
    return faults

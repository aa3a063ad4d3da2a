"""Every way into a sharded job gives the same bits.

A base with its AdamW state is loaded at the wide size on 1, 2 and 4 ranks, from checkpoints of
torch.distributed written by 1 and by 4 ranks, from a Hugging Face directory, from the output of `mupscale upscale`,
from such an output that was killed and resumed, and from the running base; for k = 2 and 3, and deeper with a wider
feed-forward, and by new units; without noise, with μP noise, with signal-normalised noise, and with new units that are
copies of trained ones and entries that are split over copies; over one mesh dimension and over two. The
digest over all full tensors must be that of `mu.upscale` in one process, and that is held against the slow twin of the
kernel. Controls: all digests that are to be met differ from each other, and another seed gives another one.

    python benchmarks/sharded.py [--quick]

Prints, last, `digests=equal combos=N worst=E`; the exit code is 1 when a digest differs or E is above 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import mupscale as mu
from harness.launched import launch
from harness.oracle import expand_slowly
from harness.program import Outcome, option, run
from harness.sharded_bases import grow, grown_here, train, write_llama
from harness.sharded_cases import (
    NOISES,
    QUICK,
    STREAMED,
    digest,
    family,
    goals,
    model_named,
    noises,
    others,
    plans_to_json,
    request,
    save,
)
from mupscale.models.names import named_tensors
from mupscale.rules.scale import ONE


def oracle_error(run: mu.Run, base: dict[str, torch.Tensor], plan: mu.Plan) -> float:
    """The largest difference of a widened weight from the slow twin of the kernel."""
    worst = 0.0
    for name, kind, tensor in named_tensors(run.model):
        entry = plan[name]
        if entry.sources and entry.fill != "own" and not entry.shift:
            scale = entry.change.s if kind == "parameter" else ONE
            want = expand_slowly(base[entry.sources[0]].detach(), entry.axes, scale)
            worst = max(worst, float((tensor.detach().double() - want.double()).abs().max()))
    return worst


def base_of(name: str, folder: Path) -> mu.Run:
    """A trained base, which is then on the disk too."""
    if name == "llama":
        return write_llama(folder, goals())
    torch.manual_seed(0)
    base = train(name, model_named(name).base())
    save(base, folder / f"{name}.dcp1", flat=True)
    return base


def prepare(folder: Path) -> tuple[dict[str, str], float]:
    """Bases, directories and plans on the disk; the digests that everything is held against."""
    os.environ["MUPSCALE_TEST_FOLDER"] = str(folder)
    for name, text in plans_to_json().items():
        (folder / f"{name}.json").write_text(text)
    wanted, worst, cut = {}, 0.0, 0
    for name in ("llama", *others()):
        run = base_of(name, folder)
        model = model_named(name)
        base = {n: t for n, _, t in named_tensors(run.model)}
        for goal in model.goals:
            for noise in noises(name):
                wide = grown_here(run, name, goal, noise)
                wanted[f"{name} k={goal} {noise}"] = digest(wide, lambda t: t)
                if noise == "none":
                    worst = max(worst, oracle_error(wide, base, model.plan(goal)))
                if name == "llama" and goal == goals()[0]:
                    wanted[f"{name} k={goal} {noise} bf16"] = half_digest(wide)
                if name == "llama" and noise in STREAMED:
                    grown, wish = family(goal), request(goal, NOISES[noise][1])
                    grow(folder / "hf", folder / f"streamed.{goal}.{noise}", grown, wish, kill=False)
                    cut += grow(folder / "hf", folder / f"resumed.{goal}.{noise}", grown, wish, kill=True)
    print(f"{cut} of {len(goals()) * len(STREAMED)} streams were killed in the middle")
    return wanted, worst


def half_digest(run: mu.Run) -> str:
    """The same run with parameters rounded to bfloat16, once, and moments as they are."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.data = parameter.data.bfloat16()
        for buffer in run.model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.bfloat16()
    return digest(run, lambda t: t)


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.quick:
        os.environ[QUICK] = "1"
    started = time.perf_counter()
    failed: list[str] = []
    combos = 0
    worlds = (2,) if chosen.quick else (4, 1, 2)
    with tempfile.TemporaryDirectory() as name:
        wanted, worst = prepare(Path(name))
        if len(set(wanted.values())) != len(wanted):
            failed.append("two of the digests to be met are one, so that they tell nothing apart")
        print(f"prepared in {time.perf_counter() - started:.0f} s: {len(wanted)} digests to be met")
        for world in worlds:  # the first of them write what all of them read
            cases = [*(["save_sharded"] if world == worlds[0] else []), "digests"]
            launched = launch("harness.sharded_cases", cases, world, timeout=900, folder=Path(name))
            found = launched["digests"][0]
            for label, value in found.items():
                model, k, noise, *rest = label.split()
                expected = wanted[" ".join([model, k, noise, *(["bf16"] if "bf16" in rest else [])])]
                if "control" in rest:
                    if value == expected:
                        failed.append(f"{world} ranks: another seed gives the same digest")
                    continue
                combos += 1
                if value != expected or any(other[label] != value for other in launched["digests"]):
                    failed.append(f"{world} ranks, {label}: {value}, expected {expected}")
            print(f"{world} ranks: {len(found)} combinations", flush=True)
    equal = "different" if failed else "equal"
    if worst > 0:
        failed.append(f"{worst:.1e} from the slow twin of the kernel")
    return Outcome(f"digests={equal} combos={combos} worst={worst:.1e}", failed)


if __name__ == "__main__":
    quick = option("--quick", action="store_true", help="three models, k = 3, 2 ranks")
    sys.exit(run(measure, quick, doc=__doc__))

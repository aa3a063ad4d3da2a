"""Every way into a sharded job gives the same bits.

A base with its AdamW state is loaded at the wide size on 1, 2 and 4 ranks, from checkpoints of
torch.distributed written by 1 and by 4 ranks, from a Hugging Face directory, from the output of `mupscale upscale`,
from such an output that was killed and resumed, and from the running base; for k = 2 and 3, and deeper with a wider
feed-forward, without noise, with μP noise and with signal-normalised noise; over one mesh dimension and over two. The
digest over all full tensors must be that of `mu.upscale` in one process, and that is held against the slow twin of the
kernel. Controls: all digests that are to be met differ from each other, and another seed gives another one.

    python benchmarks/sharded.py [--quick]

Prints, last, `digests=equal combos=N worst=E`; the exit code is 1 when a digest differs or E is above 0.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import mupscale as mu
from benchmarks.sharded_cases import (
    NOISES,
    SEED,
    SIZES,
    adamw,
    digest,
    family,
    goals,
    llama_model,
    model_named,
    others,
    plans_to_json,
    request,
    save,
)
from harness.launched import launch
from harness.models import CASES
from mupscale.checkpoints.grow import job_of, record
from mupscale.checkpoints.request import Request
from mupscale.checkpoints.trainer_groups import trainer_order
from mupscale.families.process import plan_in_process
from mupscale.families.record import FamilyPlan
from mupscale.files.directory import read_directory
from mupscale.jobs.partial import partial
from mupscale.jobs.worker import run_job
from mupscale.plans.fits import identity_plan
from mupscale.plans.names import named_tensors
from mupscale.rules.scale import ONE
from mupscale.tensors.oracle import expand_slowly


def train(name: str, model: torch.nn.Module, steps: int = 3) -> mu.Run:
    """A base with moments that are not zero."""
    optimizer = adamw(model, identity_plan(model))
    for step in range(steps):
        optimizer.zero_grad()
        if name == "llama":
            ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
        else:
            loss = CASES[name].loss(model, step)
        loss.backward()
        optimizer.step()
    return mu.Run(model, optimizer)


def save_directory(run: mu.Run, path: Path) -> None:
    """What the stock Trainer leaves: weights, config, and optimizer state by position."""
    model = run.model
    model.save_pretrained(path)  # type: ignore[operator]
    named = dict(model.named_parameters())
    decayed, bare = ([named[n] for n in names] for names in trainer_order(model, {}))
    stock = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]
    )
    stock.state.update(run.optimizers[0].state)
    torch.save(stock.state_dict(), path / "optimizer.pt")


def grow(base: Path, out: Path, family: FamilyPlan, request: Request, kill: bool) -> bool:
    """What `mupscale upscale` writes, undisturbed, or by a process that is killed in the middle and run again."""
    directory = read_directory(base)
    job = job_of(directory, out, record(directory, family, request), block_bytes=4096)
    cut_short = False
    if kill:
        child = os.fork()
        if child == 0:
            try:
                run_job(job)
            finally:
                os._exit(0)
        journals = partial(out)
        while not list(journals.glob("*journal*")) and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        cut_short = not out.exists()
    run_job(job)
    return cut_short


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


def prepare(folder: Path) -> tuple[dict[str, str], float]:
    """Bases, directories and plans on the disk; the digests that everything is held against."""
    os.environ["MUPSCALE_TEST_FOLDER"] = str(folder)
    for name, text in plans_to_json().items():
        (folder / f"{name}.json").write_text(text)
    wanted, worst, cut = {}, 0.0, 0
    for name in ("llama", *others()):
        torch.manual_seed(0)
        run = train(name, llama_model(SIZES) if name == "llama" else model_named(name).base())
        save(run, folder / f"{name}.dcp1", flat=True)
        if name == "llama":
            save_directory(run, folder / "hf")
            for goal in goals():
                asked_for = request(goal, None)
                grown = plan_in_process(folder / "hf", asked_for.multipliers, to=asked_for.to)
                (folder / f"family{goal}.json").write_text(grown.to_json())
        model = model_named(name)
        base = {n: t for n, _, t in named_tensors(run.model)}
        for goal in model.goals:
            for noise, (asked, _) in NOISES.items():
                make, plan = functools.partial(model.wide, goal), model.plan(goal)
                wide = (
                    mu.widen(run, make, plan=plan)
                    if asked is None
                    else mu.upscale(run, make, asked, seed=SEED, plan=plan)
                )
                wanted[f"{name} k={goal} {noise}"] = digest(wide, lambda t: t)
                if asked is None:
                    worst = max(worst, oracle_error(wide, base, plan))
                if name == "llama" and goal == goals()[0]:
                    wanted[f"{name} k={goal} {noise} bf16"] = half_digest(wide)
                if name == "llama":
                    grown, wish = family(goal), request(goal, NOISES[noise][1])
                    grow(folder / "hf", folder / f"streamed.{goal}.{noise}", grown, wish, kill=False)
                    cut += grow(folder / "hf", folder / f"resumed.{goal}.{noise}", grown, wish, kill=True)
    print(f"{cut} of {len(goals()) * len(NOISES)} streams were killed in the middle")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two models, k = 3, 4 and 2 ranks")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    if arguments.quick:
        (folder / "quick").touch()
    started = time.perf_counter()
    differ: list[str] = []
    combos = 0
    try:
        wanted, worst = prepare(folder)
        if len(set(wanted.values())) != len(wanted):
            differ.append("two of the digests to be met are one, so that they tell nothing apart")
        print(f"prepared in {time.perf_counter() - started:.0f} s: {len(wanted)} digests to be met")
        for world in (4, 2) if arguments.quick else (4, 1, 2):  # 4 ranks write what all of them read
            cases = ["save_sharded", "digests"] if world == 4 else ["digests"]
            launched = launch("benchmarks.sharded_cases", cases, world, timeout=900, folder=folder)
            found = launched["digests"][0]
            for label, value in found.items():
                name, k, noise, *rest = label.split()
                expected = wanted[" ".join([name, k, noise, *(["bf16"] if "bf16" in rest else [])])]
                if "control" in rest:
                    if value == expected:
                        differ.append(f"{world} ranks: another seed gives the same digest")
                    continue
                combos += 1
                if value != expected or any(other[label] != value for other in launched["digests"]):
                    differ.append(f"{world} ranks, {label}: {value}, expected {expected}")
            print(
                f"{world} ranks: {len(found)} combinations, {time.perf_counter() - started:.0f} s so far",
                flush=True,
            )
    finally:
        shutil.rmtree(folder)
    for line in differ:
        print(f"FAILED: {line}")
    if worst > 0:
        print(f"FAILED: {worst:.1e} from the slow twin of the kernel")
    print(f"digests={'equal' if not differ else 'different'} combos={combos} worst={worst:.1e}")
    return 1 if differ or worst > 0 else 0


if __name__ == "__main__":
    sys.exit(main())

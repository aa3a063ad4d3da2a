"""Growing gives the same bits as before: digests of wide tensors, optimizer state, noise and streamed files.

The digests in `same_bits.json` were made once and are compared ever after. Bases are filled by integer arithmetic
instead of training, so that they are equal on every machine; what is digested is what growing makes of them.

    python benchmarks/same_bits.py             compare
    python benchmarks/same_bits.py --record    write new digests, after a change that is meant to change bits

The last line is `digests=N equal=N control=N`; the exit code is 1 unless all are equal. `control` counts the digests
that change when one entry of the base is the next larger float.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import mupscale as mu
from harness.llama_files import Llama, job_for, write_directory
from harness.models import CASES, Case
from harness.program import Outcome, option, run
from harness.setups import SETUPS, Setup
from mupscale.files.directory import read_directory
from mupscale.jobs.worker import run_job

STORED = Path(__file__).with_name("same_bits.json")
LEAST = 40
NOISES: Mapping[str, Any] = {
    "mup": mu.MupNoise(0.1),
    "signal": mu.SignalNoise(0.2),
    "paired": mu.PairedNoise(0.3, vectors=False),
}
STATES = (
    "SGD momentum", "Adam amsgrad", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop centered", "Adagrad", "Adadelta",
    "ASGD", "Rprop", "Adafactor", "Muon original", "Lion",
)  # fmt: skip


def pattern_(tensor: Tensor, salt: int) -> None:
    """Fill with numbers between 1/4 and 3/4 that integer arithmetic gives; whole numbers are left as they are."""
    if not tensor.is_floating_point():
        return
    index = torch.arange(tensor.numel(), dtype=torch.int64)
    mixed = ((index + 1) * 2654435761 + salt * 40503) % (1 << 20)
    with torch.no_grad():
        tensor.copy_((mixed.double() / (1 << 21) + 0.25).view(tensor.shape).to(tensor.dtype))


def digest(parts: Iterator[tuple[str, Any]]) -> str:
    """One digest of named tensors, numbers and bytes."""
    found = hashlib.sha256()
    for name, value in parts:
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(value if isinstance(value, bytes) else repr(value).encode())
    return found.hexdigest()[:16]


def base_run(
    case: Case, setup: Setup | None = None, dtype: torch.dtype = torch.float32, nudge: bool = False
) -> mu.Run:
    """A base with weights, buffers and optimizer state that depend on nothing but their names and shapes."""
    torch.manual_seed(0)
    model = case.make(case.base).to(dtype)
    optimizers = setup.build(model) if setup is not None else []
    if setup is not None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        for _ in range(setup.warm):
            for optimizer in optimizers:
                optimizer.step()
    for salt, tensor in enumerate(model.state_dict().values()):
        pattern_(tensor, salt)
    states = [
        [value for value in optimizer.state[p].values() if isinstance(value, Tensor) and value.dim()]
        for optimizer in optimizers
        for p in model.parameters()
        if p in optimizer.state
    ]
    for salt, state in enumerate(states):
        for i, value in enumerate(state):
            pattern_(value, 1000 * salt + i)
    with torch.no_grad():
        for tensor in [*model.parameters(), *chain(*states)] if nudge else ():
            first = tensor.view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.full_like(first, 2.0)))
    return mu.Run(model, optimizers)


def tensors(run: mu.Run) -> Iterator[tuple[str, Any]]:
    yield from run.model.state_dict().items()


def state(run: mu.Run) -> Iterator[tuple[str, Any]]:
    """Settings and state of every optimizer, by the name of the parameter."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            members = sorted((names[id(p)], p) for p in group["params"])
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for name, parameter in members:
                yield name, json.dumps(settings, sort_keys=True, default=repr)
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    yield f"{name} {key}", value


def streamed(noise: str | None, dtype: str, cast: str | None, nudge: bool) -> str:
    model = Llama(hidden=16, ffn=24, heads=4, kv_heads=2, layers=1, vocabulary=20)
    plan = model.plan(3)
    with tempfile.TemporaryDirectory() as folder:
        base, out = Path(folder, "base"), Path(folder, "wide")
        write_directory(base, model.shapes(), dtype, 2)
        for file in sorted(base.glob("*.safetensors")):
            raw = bytearray(file.read_bytes())
            start = 8 + int.from_bytes(raw[:8], "little")
            kind = torch.float32 if dtype == "F32" else torch.bfloat16
            body = torch.frombuffer(memoryview(raw)[start:], dtype=kind)
            pattern_(body, 7)
            if nudge:
                body[0] += 0.125
            file.write_bytes(raw)
        job = job_for(
            plan,
            read_directory(base),
            out,
            model.noise(plan) if noise else None,
            dtype=cast,
            shard_bytes=20_000,
        )
        run_job(job)
        files = sorted(out.glob("model*"))
        return digest((file.name, file.read_bytes()) for file in files)


def cases() -> dict[str, Callable[[bool], str]]:
    """What is digested, by name; each takes whether the base is nudged."""
    found: dict[str, Callable[[bool], str]] = {}

    def weights(case: Case, nudge: bool, dtype: torch.dtype = torch.float32) -> str:
        run = base_run(case, None, dtype, nudge)
        return digest(tensors(mu.grow(run, lambda: case.make(case.wide), plan=case.plan)))

    for name, case in CASES.items():
        found[f"weights {name}"] = partial(weights, case)
    found["weights Llama bf16"] = partial(weights, CASES["Llama"], dtype=torch.bfloat16)
    for name in STATES:
        setup, case = SETUPS[name], CASES["MLP" if name.startswith("Muon") else "MLP+p"]

        def grown(nudge: bool, setup: Setup = setup, case: Case = case) -> str:
            return digest(
                state(
                    mu.grow(base_run(case, setup, nudge=nudge), lambda: case.make(case.wide), plan=case.plan)
                )
            )

        found[f"state {name}"] = grown
    for kind, noise in NOISES.items():
        for name in ("MLP", "Llama", "GPT-2"):
            case = CASES[name]

            def noisy(nudge: bool, case: Case = case, noise: Any = noise) -> str:
                run = base_run(case, SETUPS["AdamW"], nudge=nudge)
                grown = mu.upscale(run, lambda: case.make(case.wide), noise, seed=3, plan=case.plan)
                return digest(tensors(grown))

            found[f"noise {kind} {name}"] = noisy

    def twice(nudge: bool) -> str:
        middle, last = (12, 16, 8), (24, 16, 24)
        run = base_run(CASES["MLP"], SETUPS["AdamW"], nudge=nudge)
        once = mu.upscale(run, lambda: CASES["MLP"].make(middle), mu.MupNoise(0.1), prove=False)
        again = mu.upscale(once, lambda: CASES["MLP"].make(last), mu.MupNoise(0.1), prove=False)
        return digest(iter([*tensors(again), *state(again)]))

    def back(nudge: bool) -> str:
        case = CASES["Llama+p"]
        run = base_run(case, SETUPS["AdamW"], nudge=nudge)
        wide = mu.grow(run, lambda: case.make(case.wide), plan=case.plan)
        narrow = mu.narrow(wide, lambda: case.make(case.base))
        return digest(iter([*tensors(narrow), *state(narrow)]))

    def dicts(nudge: bool) -> str:
        case = CASES["GPT-2"]
        run = base_run(case, SETUPS["AdamW"], nudge=nudge)
        names = [name for name, _ in run.model.named_parameters()]
        wide = mu.trainers.grow_optimizer_state_dict(
            run.optimizers[0].state_dict(), case.plan, optim.AdamW, names=names
        )
        pairs = [
            (f"{position} {key}", value)
            for position, s in wide["state"].items()
            for key, value in sorted(s.items())
        ]
        return digest(iter([*mu.trainers.grow_state_dict(run.model.state_dict(), case.plan).items(), *pairs]))

    def average(nudge: bool) -> str:
        case = CASES["ResNet"]
        run = base_run(case, nudge=nudge)
        averaged = mu.Run(run.model, ema=optim.swa_utils.AveragedModel(run.model))
        wide = mu.upscale(averaged, lambda: case.make(case.wide), mu.MupNoise(0.05), plan=case.plan)
        assert isinstance(wide.ema, nn.Module)
        return digest(iter(wide.ema.state_dict().items()))

    found |= {"grown twice": twice, "narrow": back, "state dicts": dicts, "average": average}
    for noise, dtype, cast in (
        (None, "F32", None),
        ("noise", "F32", None),
        ("noise", "BF16", None),
        (None, "F32", "BF16"),
    ):
        label = " ".join(filter(None, ("stream", noise, dtype, cast and f"to {cast}")))
        found[label] = partial(streamed, noise, dtype, cast)
    return found


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    found = cases()
    digests = {name: make(False) for name, make in found.items()}
    if chosen.record:
        STORED.write_text(json.dumps(digests, indent=1) + "\n")
    stored = json.loads(STORED.read_text())
    differ = sorted(name for name in stored.keys() | digests.keys() if stored.get(name) != digests.get(name))
    failed = [f"{name}: {digests.get(name)}, stored {stored.get(name)}" for name in differ]
    same = [name for name, make in found.items() if make(True) == digests[name]]
    failed += [f"{name}: the control, another float in the base, gives the same digest" for name in same]
    if len(digests) < LEAST:
        failed.append(f"{len(digests)} digests, expected at least {LEAST}")
    control = len(digests) - len(same)
    return Outcome(f"digests={len(digests)} equal={len(digests) - len(differ)} control={control}", failed)


if __name__ == "__main__":
    record = option("--record", action="store_true", help="write the digests instead of comparing them")
    sys.exit(run(measure, record, doc=__doc__))

"""Every optimizer with a row, and every name of the Trainer's optim=: is a run that is widened in mid-training exact?

A small network trains, is widened with its optimizer state, and both continue for 12 steps on the same data. The figure is the
largest difference of their outputs, relative to the largest output: in float64, and in float32. Classes of packages that
are not installed, or that compute in float32 alone, are written from their published descriptions (`harness/published.py`,
`harness/muons.py`), with hard-coded floors and 16-bit iterations lifted; the class of the package is run next to them.

    python benchmarks/optimizers.py [--json docs/optimizers.json]

A name is supported if the state of a run is carried, and it ran if the class of its package did; names that were run with a
class written from its description are counted apart. Names of 8-bit and 4-bit classes run on tensors that are too small to be
quantised, and once more on larger ones: `quantised` is the largest relative difference of their losses to those of the base
over 20 steps, `quantised_fresh` the smallest such difference with fresh state, the control.

`hybrid` is that of a small GPT on real text with Muon and AdamW in one class, clipped and scheduled as nanochat is, in
float64; `hybrid_control` that with the row of AdamW for all tensors. It needs `text/openstax.jsonl.xz` in `$MUPSCALE_DATA`.

The aims are 24 names that are supported and 20 that ran; the script says which are missed. The last line is `menu=…
supported=… ran=… written=… not_run=… refused=… unknown=… aims_missed=… rows=… worst64=… worst32=… quantised=…
quantised_fresh=… hybrid=… hybrid_control=…`. The exit code is 1 when a bound fails or a figure is not finite; a missed aim
does not change it.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
from harness.closeness import largest
from harness.data import DATA
from harness.evidence import key_of
from harness.hybrid import BASE_TEXT, ONE_ROW, WIDE_TEXT, continued, text_loss
from harness.known_optimizers import CASES, WRITTEN_RULES, Known, stand_ins
from harness.muons import MoonlightMuon
from harness.program import Outcome, option, run
from harness.runs import step
from harness.toys import mlp
from mupscale.rules.optimizer_rule import OptimizerRule
from mupscale.trainers.menu import MENU, REFUSED_NAMES, named_optimizer

BEFORE, STEPS = 6, 12
WORST64, WORST32, MOVED = 1e-12, 1e-4, 1e-4
QUANTISED, HYBRID = 0.1, 1e-12
"""The first is for state of 4 bits; fresh state is off by several times as much."""
SUPPORTED, RAN = 24, 20
"""Aims, not bounds: which packages are installed is not up to this script."""
TEXT = DATA / "text" / "openstax.jsonl.xz"
FASTER = {"torch.optim.SGD": 0.5, "schedulefree.SGDScheduleFree": 0.5}
"""Rates at which the network moves, where 0.01 is too small."""
Make = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Figure:
    """One optimizer in one dtype."""

    name: str
    row: str
    source: str
    dtype: str
    error: float
    moved: float


def network(width: int) -> nn.Module:
    return mlp(width, width)


def error(make: Make, dtype: torch.dtype, rules: Mapping[str, OptimizerRule]) -> tuple[float, float]:
    """The largest relative difference of outputs after growth, and how far the base moved meanwhile."""
    torch.manual_seed(0)
    model, x = network(6).to(dtype), torch.randn(32, 3, dtype=dtype)
    y = torch.sin(2 * x[:, :2])
    run = mu.Run(model, make(list(model.parameters())))

    def stepped(of: mu.Run) -> Tensor:
        outputs: Tensor = of.model(x)
        step(of, (outputs - y).square().mean())
        return outputs.detach()

    for _ in range(BEFORE):
        stepped(run)
    start: Tensor = run.model(x).detach()
    wide = mu.grow(run, lambda: network(18).to(dtype), rules=rules)
    pairs = [(stepped(run), stepped(wide)) for _ in range(STEPS)]
    size = max(float(base.abs().max()) for base, _ in pairs)
    worst = largest(float((grown - base).abs().max()) for base, grown in pairs) / size
    return worst, float((pairs[-1][0] - start).abs().max()) / size


def figures(name: str, row: str, makes: Mapping[tuple[str, torch.dtype], Make]) -> list[Figure]:
    found = []
    for (source, dtype), make in makes.items():
        worst, moved = error(make, dtype, WRITTEN_RULES)
        found.append(Figure(name, row, source, str(dtype)[6:], worst, moved))
    return found


def both(written: Make, original: Make | None, single: bool) -> dict[tuple[str, torch.dtype], Make]:
    """In float64 the class that can, in float32 the class of the package where it is installed."""
    exact = written if single or original is None else original
    source = "written" if exact is written and written is not original else "package"
    found = {(source, torch.float64): exact, ("written", torch.float32): written}
    if original is not None:
        found = {key: make for key, make in found.items() if key[1] is torch.float64}
        found["package", torch.float32] = original
    return found


def of_row(name: str, case: Known) -> list[Figure]:
    def tuned(make: Make) -> Make:
        # The trials of single tensors have large rates; a network needs smaller ones.
        def smaller(params: list[nn.Parameter]) -> Optimizer:
            optimizer = make(params)
            for group in optimizer.param_groups:
                if group["lr"] is not None:
                    group["lr"] = group["lr"] * 0.2
                if group.get("max_lr"):
                    group["max_lr"] = group["max_lr"] * 0.2
            return optimizer

        return smaller

    original = tuned(case.make_original) if case.installed else None
    written = original if case.written is None and original else tuned(case.make_written)
    if "Muon" in name and "its" not in name:
        written, original = tuned(lambda params: _with_matrices(case, params)), None
    return figures(name, case.row, both(written, original, case.single))


def _with_matrices(case: Known, params: list[nn.Parameter]) -> Optimizer:
    """A hybrid: Muon for each matrix, its other optimizer for vectors."""
    key = "kind" if "kind" in case.settings else "use_muon"
    rest = {
        key: "adamw" if key == "kind" else False,
        "lr": 0.1,
        "weight_decay": 0.5,
        "eps": 0.1,
        "betas": (0.9, 0.99),
    }
    assert case.written is not None
    groups = [{"params": [p], **case.settings} for p in params if p.dim() == 2]
    rule: Any = case.written
    made: torch.optim.Optimizer = rule([*groups, {"params": [p for p in params if p.dim() != 2], **rest}])
    return made


def moonlight() -> list[Figure]:
    def make(params: list[nn.Parameter]) -> Optimizer:
        matrices, rest = ([p for p in params if (p.dim() == 2) is flat] for flat in (True, False))
        return MoonlightMuon(lr=0.02, wd=0.5, muon_params=matrices, adamw_params=rest, adamw_eps=0.1)

    return figures("Muon, Moonlight", "moonlight", both(make, None, False))


def of_name(name: str, installed: bool) -> list[Figure]:
    """A name of the Trainer, with the class and the settings that the Trainer gives it."""
    chosen = MENU[name]

    def make(params: list[nn.Parameter]) -> Optimizer:
        kind, own = named_optimizer(name)
        optimizer = kind(params, lr=FASTER.get(chosen.kind, 0.01), **own)  # type: ignore[call-arg]
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    single = installed and chosen.kind.startswith(("bitsandbytes", "torchao"))
    source = "package" if installed else "written"
    dtypes = [torch.float32] if single else [torch.float64, torch.float32]
    return figures(f"optim={name}", chosen.kind, {(source, dtype): make for dtype in dtypes})


def quantised(name: str) -> tuple[float, float] | None:
    """The largest relative difference of losses to the base's, with carried and with fresh state; None if none is quantised.

    Rows of 80 entries do not end with blocks of 256, so the state is rounded again.
    """
    torch.manual_seed(0)
    kind, own = named_optimizer(name)
    model, x = network(80), torch.randn(32, 3)
    y = torch.sin(2 * x[:, :2])
    base = mu.Run(model, kind(model.parameters(), lr=3e-3, **own))  # type: ignore[call-arg]

    def stepped(of: mu.Run) -> float:
        loss = (of.model(x) - y).square().mean()
        step(of, loss)
        return float(loss.detach())

    for _ in range(BEFORE):
        stepped(base)
    wide = mu.grow(base, lambda: network(160), rules=WRITTEN_RULES)
    if "rounded" not in wide.provenance:
        return None
    copy = mu.grow(model, lambda: network(160)).model
    assert wide.plan is not None
    fresh = mu.Run(copy, mu.trainers.optimizer_in_units(copy, wide.plan, name, lr=3e-3, rules=WRITTEN_RULES))
    losses = [(stepped(base), stepped(wide), stepped(fresh)) for _ in range(20)]
    carried, anew = (largest(abs(of[i] / of[0] - 1) for of in losses) for i in (1, 2))
    return carried, anew


def hybrid() -> tuple[float, float]:
    """How far a hybrid is from its base on real text, and with one row for all tensors."""
    mu.rules.declare_neutral("peak")
    torch.set_default_dtype(torch.float64)
    loss = text_loss(TEXT)
    found = [continued(BASE_TEXT, WIDE_TEXT, loss, *row)[0] for row in ((), (ONE_ROW,))]
    torch.set_default_dtype(torch.float32)
    return found[0], found[1]


def measure(chosen: argparse.Namespace) -> Outcome:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.compile = lambda function, **_: function  # type: ignore[assignment]  # torchao compiles its step
    from transformers.training_args import OptimizerNames

    missing = stand_ins()
    found = [figure for name, case in CASES.items() for figure in of_row(name, case)] + moonlight()
    sys.modules.update(missing)
    names = [name.value for name in OptimizerNames]
    ran: list[str] = []
    written: list[str] = []
    not_run: list[str] = []
    coded: dict[str, tuple[float, float]] = {}
    for name in (name for name in names if name in MENU):
        package = MENU[name].kind.partition(".")[0]
        try:
            found += of_name(name, package not in missing)
            (written if package in missing else ran).append(name)
            if MENU[name].quantised and (pair := quantised(name)) is not None:
                coded[name] = pair
        except mu.MupscaleError as reason:
            if "cannot be imported" not in str(reason):
                raise
            not_run.append(name)
    for f in found:
        print(f"{f.name:36} {f.source:8} {f.dtype:8} {f.error:8.1e}   moved {f.moved:.1e}   {f.row}")
    for name in not_run:
        print(f"optim={name} did not run: {MENU[name].kind} is not installed")
    for name, (carried, fresh) in coded.items():
        print(f"optim={name:30} quantised: losses differ by {carried:.1e}, with fresh state by {fresh:.1e}")
    for name in (name for name in names if name in MENU and MENU[name].quantised and name not in coded):
        print(f"optim={name} did not run with quantised state: {MENU[name].kind} is not installed")
    worst64, worst32 = (largest(f.error for f in found if f.dtype == kind) for kind in ("float64", "float32"))
    supported = sum(name in MENU for name in names)
    refused = sum(name in REFUSED_NAMES for name in names)
    unknown = len(names) - supported - refused
    aims = {
        f"{supported} names are supported, and the aim is {SUPPORTED}": supported >= SUPPORTED,
        f"{len(ran)} names ran with the class of their package, and the aim is {RAN}": len(ran) >= RAN,
    }
    missed = [text for text, reached in aims.items() if not reached]
    failed = [f"{f.name} in {f.dtype} moved by {f.moved:.1e} only" for f in found if not f.moved >= MOVED]
    bounds = {
        f"{unknown} names are neither supported nor refused": unknown == 0,
        f"float64 differs by {worst64:.1e}": worst64 <= WORST64,
        f"float32 differs by {worst32:.1e}": worst32 <= WORST32,
        **{
            f"{name} with quantised state differs by {carried:.1e}, with fresh state by {fresh:.1e}": carried
            <= min(QUANTISED, fresh / 3)
            for name, (carried, fresh) in coded.items()
        },
    }
    quantised_told, hybrid_told = "not_run", "not_run hybrid_control=not_run"
    if coded:
        worst = largest(carried for carried, _ in coded.values())
        least = min(fresh for _, fresh in coded.values())
        quantised_told = f"{worst:.1e} quantised_fresh={least:.1e}"
    if TEXT.exists():
        off, control = hybrid()
        bounds |= {
            f"the hybrid differs by {off:.1e}": off <= HYBRID,
            f"one row for all tensors of the hybrid differs by {control:.1e} only": control > 1e-4,
        }
        hybrid_told = f"{off:.1e} hybrid_control={control:.1e}"
    else:
        print(
            f"the hybrid did not run: there is no {TEXT.name}; set MUPSCALE_DATA to the folder that holds text/{TEXT.name}"
        )
    failed += [text for text, holds in bounds.items() if not holds]
    for aim in missed:
        print(f"aim missed: {aim}")
    if chosen.json:
        key = key_of("optimizers")
        chosen.json.write_text(json.dumps([{**asdict(f), "key": key} for f in found], indent=1) + "\n")
    rows = len({f.row for f in found})
    line = (
        f"menu={len(names)} supported={supported} ran={len(ran)} written={len(written)} "
        f"not_run={len(not_run)} refused={refused} unknown={unknown} aims_missed={len(missed)} rows={rows} "
        f"worst64={worst64:.1e} worst32={worst32:.1e} quantised={quantised_told} hybrid={hybrid_told}"
    )
    return Outcome(line, failed)


if __name__ == "__main__":
    figures_file = option("--json", type=Path, help="where to write the figures, for the documentation")
    sys.exit(run(measure, figures_file, doc=__doc__))

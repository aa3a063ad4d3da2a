"""Trackers receive what the run was: files of TensorBoard, W&B and MLflow are read back and compared with it."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.diagnostics import grad_norm, log_growth, log_study, noise_shares, reference_lr, symmetry
from mupscale.tuning import Proxy, Settings

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def make(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def loss(model: nn.Module) -> torch.Tensor:
    value: torch.Tensor = (model(X.to(next(model.parameters()).dtype)) - 1).square().mean()
    return value


def step(run: mu.Run) -> None:
    run.optimizer.zero_grad()
    loss(run.model).backward()
    run.optimizer.step()


@pytest.fixture
def base() -> mu.Run:
    torch.manual_seed(0)
    model = make(4)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(5):
        step(run)
    return run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of a few short trials."""

    def train(run, steps, report):
        for i in range(run.steps, steps):
            step(run)
            report(i, loss(run.model))

    folder = tmp_path_factory.mktemp("study")
    settings = Settings(width=4, k=2, steps=4, lrs=[0.01, 0.02], noises=[0, 0.1], factors=[1], extend=0)
    recipe = mu.tune(Proxy(make, train), settings, folder=folder)
    return folder, recipe


class Writer:
    """What a SummaryWriter looks like."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def flush(self) -> None:
        pass


def test_growth_is_logged_as_it_was(base):
    """Controls: a run without noise has none to log, and its loss and its norm do not change."""
    base.optimizer.zero_grad()  # gradients that are there are carried
    wide, writer = mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), loss=loss), Writer()
    told = log_growth(writer, base, wide, loss=loss, steps=5)
    assert {(name, value, 5) for name, value in told.items()} == set(writer.told)
    assert all(p.grad is None for p in base.model.parameters()), "gradients are as before"
    for when, value in wide.provenance["loss"].items():
        assert told[f"growth/loss_{when}"] == pytest.approx(value, rel=1e-6)
    assert told["growth/noise"] == max(found.share for found in noise_shares(base, wide).values())
    assert told["growth/symmetry/0.weight"] == symmetry(wide)["0.weight"]
    assert told["growth/lr_after"] == told["growth/lr_before"] == reference_lr(wide.optimizer) == 0.01
    loss(wide.model).backward()
    assert told["growth/grad_norm_after"] == pytest.approx(float(grad_norm(wide.model, wide)), rel=1e-6)
    exact = log_growth(Writer(), base, mu.grow(base, lambda: make(8)), loss=loss)
    assert "growth/noise" not in exact
    assert exact["growth/symmetry"] == 0
    for name in ("loss", "grad_norm"):
        assert exact[f"growth/{name}_after"] == pytest.approx(exact[f"growth/{name}_before"], rel=1e-5)
        assert told[f"growth/{name}_after"] != pytest.approx(told[f"growth/{name}_before"], rel=1e-5)


def test_without_a_loss_what_upscale_recorded_is_logged(base):
    wide = mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), loss=loss)
    told = log_growth(Writer(), base, wide)
    assert told["growth/loss_after"] == wide.provenance["loss"]["after"]
    assert "growth/grad_norm_after" not in told


def test_a_study_is_logged_point_by_point(study):
    folder, recipe = study
    writer = Writer()
    told = log_study(writer, folder)
    assert [values["study/point"] for values in told] == list(range(len(told)))
    for row, values in zip(recipe.tried, told, strict=False):
        assert values[f"study/{row['sweep']}/loss"] == row["loss"]
        assert values[f"study/{row['sweep']}/lr"] == row["lr"]
    assert len(told) == len(recipe.tried) + 1
    assert told[-1]["study/best/loss"] == recipe.loss
    assert {step for _, _, step in writer.told} == set(range(len(told)))


def test_what_is_no_tracker_is_refused(base, tmp_path):
    wide = mu.grow(base, lambda: make(8))
    with refused("report.not_a_tracker", where="tracker"):
        log_growth({}, base, wide)
    with refused("argument.wrong_type", where="base"):
        log_growth(Writer(), base.model, wide)
    with refused("study.no_journal", where=str(tmp_path)):
        log_study(Writer(), tmp_path)


Points = dict[str, list[tuple[int, float]]]


def tensorboard(folder: Path, log: Callable[[Any], object]) -> Points:
    pytest.importorskip("tensorboard", reason="pip install 'mupscale[trackers]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        log(writer)
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def wandb(folder: Path, log: Callable[[Any], object]) -> Points:
    module = pytest.importorskip("wandb", reason="pip install 'mupscale[trackers]'")
    from wandb.proto.wandb_internal_pb2 import Record

    with module.init(mode="offline", dir=str(folder), project="mupscale") as run:
        log(run)
    [path] = folder.rglob("*.wandb")
    found, read, until = Points(), [Record()], time.monotonic() + 60
    while read[-1].WhichOneof("record_type") != "exit" and time.monotonic() < until:
        time.sleep(0.1)  # another process writes the file, and may end after the run
        read = [Record.FromString(data) for data in records(path.read_bytes())] or [Record()]
    for record in read:
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        for name, value in items.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((int(items["_step"]), value))
    return found


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B: after 7 bytes of its own, a log of LevelDB, whose blocks have 32 KiB.

    A piece is 4 bytes of checksum, 2 of length, 1 of kind (whole, first, middle, last), and its bytes.
    """
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # too short for a piece: zeros
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def mlflow(folder: Path, log: Callable[[Any], object]) -> Points:
    module = pytest.importorskip("mlflow", reason="pip install 'mupscale[trackers]'")
    module.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    module.create_experiment("mupscale", artifact_location=str(folder / "files"))
    module.set_experiment("mupscale")
    with module.start_run() as run:
        log(module)
    client = module.MlflowClient()
    names = client.get_run(run.info.run_id).data.metrics
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names
    }


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("read_back", [tensorboard, wandb, mlflow])
def test_what_a_tracker_stores_is_what_the_run_was(read_back, base, study, tmp_path):
    """Control: what is read back of another run differs."""
    wide = mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), seed=1, loss=loss)
    told: dict[str, float] = {}
    trials: list[dict[str, float]] = []

    def log(tracker: Any) -> None:
        told.update(log_growth(tracker, base, wide, loss=loss, steps=5))
        trials.extend(log_study(tracker, study[0]))

    stored = read_back(tmp_path, log)
    assert {"growth/loss_after", "growth/noise", "growth/symmetry", "growth/lr_after"} <= stored.keys()
    for name, value in told.items():
        assert stored[name] == [(5, pytest.approx(value, rel=1e-6))]  # TensorBoard keeps float32
    for name in {name for values in trials for name in values}:
        expected = [values[name] for values in trials if name in values]
        assert [value for _, value in stored[name]] == pytest.approx(expected, rel=1e-6)
    other = log_growth(Writer(), base, mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), seed=2))
    assert stored["growth/loss_after"] != [(5, pytest.approx(other.get("growth/loss_after", 0.0), rel=1e-6))]
    assert stored["growth/symmetry"] != [(5, pytest.approx(other["growth/symmetry"], rel=1e-6))]

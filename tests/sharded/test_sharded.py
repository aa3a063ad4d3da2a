"""Loading a narrow base into a sharded wide job: how ranks agree, what they read, and what stops them all."""

import os
import shutil
import signal
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import mupscale as mu
from harness.launched import folder, launch
from harness.refusals import refusal
from mupscale.files.dcp import metadata as dcp
from mupscale.files.places import Place
from mupscale.jobs.bytes.blocks import Reader
from mupscale.plans.ends import identity_plan
from mupscale.sharded import agreement, fill, node, waiting
from mupscale.sharded.live import Sharding, is_aligned, messages
from mupscale.sharded.memory import reshard_
from mupscale.sharded.source import FiledTensor, Source
from mupscale.tensors.entry_sources import Reads
from mupscale.tensors.making import Making
from mupscale.tensors.parts import local_of, local_rectangle

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    """Sizes that no number of ranks divides, unless `n` is a multiple of it."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = nn.Linear(3, n)
        self.middle = nn.Linear(n, n)
        self.outer = nn.Linear(n, 5)

    def forward(self, x):
        return self.outer(torch.tanh(self.middle(torch.tanh(self.inner(x)))))


def plan(n: int, k: int) -> mu.Plan:
    return replace(mu.plans.plan_between(Net, n, k * n), proof="loss")


def adamw(model: nn.Module, since: mu.Plan) -> torch.optim.AdamW:
    return torch.optim.AdamW(mu.param_groups(model, since, torch.optim.AdamW, lr=1e-2))


def sharded(n: int, since: mu.Plan) -> mu.Run:
    model: Any = mu.plans.on_meta(lambda: Net(n))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.middle, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return mu.Run(model, adamw(model, since))


def saved(n: int):
    """A trained base on the disk, made by rank 0 and waited for."""
    path = folder() / f"base{n}"
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(0)
        model = Net(n)
        optimizer = adamw(model, identity_plan(model))
        model(torch.randn(7, 3)).square().sum().backward()
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        with warnings.catch_warnings(action="ignore"):
            save_dcp({"model": weights, "optim": state}, checkpoint_id=path, no_dist=True)
    dist.barrier()
    return path


def live_base(n: int) -> mu.Run:
    path = saved(n)
    run = sharded(n, identity_plan(mu.plans.on_meta(lambda: Net(n))))
    return mu.load_grown_(path, run, plan=identity_plan(run.model))


def collectives() -> dict[str, int]:
    """How many collectives each way of loading takes, and how many messages between pairs of ranks."""
    found = {}
    world = dist.get_world_size()
    ways = {
        "files": (10, None, False),
        "files, mup": (10, mu.MupNoise(0.1), False),
        "files, signal": (10, mu.SignalNoise(0.1), False),
        "live, aligned": (4 * world, None, True),
        "live, aligned, mup": (4 * world, mu.MupNoise(0.1), True),
        "live": (11 if world == 2 else 10, None, True),  # boundaries that move
    }
    for way, (n, noise, live) in ways.items():
        source = live_base(n) if live else saved(n)
        run = sharded(2 * n, plan(n, 2))
        with CommDebugMode() as counted:
            run = mu.load_grown_(source, run, plan=plan(n, 2), noise=noise)
        found[way] = counted.get_total_counts()
        found[f"{way}: messages"] = run.provenance["loaded"]["messages"]
    return found


def what_is_read() -> dict[str, int]:
    """Bytes read by this rank, bytes of its shards, and memory besides them, for a base of 6 MB and its state."""
    path, wide = saved(700), sharded(1400, plan(700, 2))
    run = mu.load_grown_(path, wide, plan=plan(700, 2))
    shards = sum(local_of(p).nbytes for p in run.model.parameters())
    return {
        "bytes": run.provenance["loaded"]["bytes"],
        "beside": run.provenance["loaded"]["beside"],
        "shards": shards,
    }


def refused() -> dict[str, tuple[set[str], str]]:
    """What this rank reads when something does not fit, on all ranks or on one only."""
    path, last = saved(10), dist.get_rank() == dist.get_world_size() - 1
    grown = plan(10, 2)
    sgd = mu.plans.on_meta(lambda: Net(20))
    fully_shard(sgd, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = mu.param_groups(sgd, grown, torch.optim.SGD, lr=1e-2, momentum=0.9)
    ways = {
        "another model's plan": lambda: mu.load_grown_(path, sharded(22, plan(11, 2)), plan=plan(11, 2)),
        "another k": lambda: mu.load_grown_(path, sharded(20, grown), plan=plan(10, 3)),
        "another optimizer": lambda: mu.load_grown_(
            path, mu.Run(sgd, torch.optim.SGD(groups, momentum=0.9)), plan=grown
        ),
        "no such place, on one rank": lambda: mu.load_grown_(
            path / "nowhere" if last else path, sharded(20, grown), plan=grown
        ),
        "another seed, on one rank": lambda: mu.load_grown_(
            path, sharded(20, grown), plan=grown, noise=mu.MupNoise(0.1), seed=int(last)
        ),
        "missing tensors": lambda: mu.load_grown_(damaged(path), sharded(20, grown), plan=grown),
        "no units": lambda: mu.load_grown_(path, stock(20), plan=grown),
    }
    found = {}
    for way, load in ways.items():
        try:
            load()
            found[way] = (set[str](), "loaded")
        except mu.MupscaleError as error:
            found[way] = (set(error.codes), str(error))
    return found


def stock(n: int) -> mu.Run:
    run = sharded(n, identity_plan(mu.plans.on_meta(lambda: Net(n))))
    return mu.Run(run.model, torch.optim.AdamW(run.model.parameters(), lr=1e-2))


def damaged(path):
    """The base without one of its tensors."""
    other = folder() / "damaged"
    if dist.get_rank() == 0 and not other.exists():
        model = Net(10)
        del model.middle.bias
        with warnings.catch_warnings(action="ignore"):
            save_dcp({"model": model.state_dict()}, checkpoint_id=other, no_dist=True)
    dist.barrier()
    return other


def nothing_is_left() -> list[bool]:
    """After a refusal the model is NaN wherever it has memory, and loading again works."""
    path, grown = saved(10), plan(10, 2)
    run = sharded(20, grown)
    load = lambda: mu.load_grown_(path, run, plan=grown, noise=mu.MupNoise(0.1), seed=dist.get_rank())  # noqa: E731
    refusal(load, "rank.other_inputs")
    poisoned = all(bool(local_of(p).isnan().all()) for p in run.model.parameters())
    empty = not run.optimizers[0].state
    mu.load_grown_(path, run, plan=grown)
    whole = all(bool(local_of(p).isfinite().all()) for p in run.model.parameters())
    return [poisoned, empty, whole and len(run.optimizers[0].state) == 6]


def slow() -> list[Any]:
    """The last rank takes longer than a collective may wait. It is waited for; without meeting first the others fail."""
    path, grown = saved(10), plan(10, 2)
    original, monkey = fill.Filler.fill_all_, pytest.MonkeyPatch()
    if dist.get_rank() == dist.get_world_size() - 1:

        def fill_all_(self, fillings):
            time.sleep(5)
            original(self, fillings)

        fill.Filler.fill_all_ = fill_all_  # type: ignore[method-assign]
    try:
        run = sharded(20, grown)
        mu.load_grown_(path, run, plan=grown, group=dist.new_group(timeout=timedelta(seconds=2)))
        whole = all(bool(local_of(p).isfinite().all()) for p in run.model.parameters())
        monkey.setattr(agreement, "meet", lambda group=None: None)
        try:
            mu.load_grown_(path, run, plan=grown, group=dist.new_group(timeout=timedelta(seconds=2)))
        except mu.MupscaleError as error:
            return [whole, error.code]
        return [whole, ""]
    finally:
        monkey.undo()
        fill.Filler.fill_all_ = original  # type: ignore[method-assign]


def killed() -> None:
    """The last rank dies while it fills its third tensor; the others say so, and their models are NaN."""
    waiting.BEAT, waiting.SILENT, waiting.LOOK = 0.1, 1.0, (0.01, 0.1)
    path, grown = saved(10), plan(10, 2)
    run, started = sharded(20, grown), time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        original, count = fill.Filler.fill_, iter(range(3))

        def fill_(self, filling):
            if next(count, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, filling)

        fill.Filler.fill_ = fill_  # type: ignore[method-assign]
    try:
        mu.load_grown_(path, run, plan=grown)
    except mu.MupscaleError as error:
        nan = all(bool(local_of(p).isnan().all()) for p in run.model.parameters())
        print(f"told after {time.monotonic() - started:.1f} s, all NaN: {nan}: {error}", flush=True)
        raise


def gathered() -> list[Any]:
    """Models that FSDP2 holds gathered after an evaluation: what is loaded stays, and state is found."""
    path, grown, x = saved(10), plan(10, 2), torch.ones(2, 3)
    want = mu.load_grown_(path, sharded(20, grown), plan=grown).model(x)
    run = sharded(20, grown)
    run.model.to_empty(device="cpu")
    base = live_base(10)
    with torch.no_grad():
        run.model(x)
        base.model(x)
    loaded = mu.load_grown_(path, run, plan=grown)
    reshard_(loaded.model)
    live = mu.load_grown_(base, sharded(20, grown), plan=grown)
    return [
        torch.equal(loaded.model(x), want),
        torch.equal(live.model(x), want),
        live.provenance["loaded"]["moments"],
    ]


def failing_between_messages() -> tuple[str, bool]:
    """A rank that fails while others wait for its slices continues serving them; all hear of it."""
    n = 11
    base, run, grown = live_base(n), sharded(2 * n, plan(n, 2)), plan(n, 2)
    original, count = fill.Filler.fill_, iter(range(2))

    def fill_(self, filling):
        if dist.get_rank() == 1 and next(count, None) is None:
            raise MemoryError("no room")
        original(self, filling)

    fill.Filler.fill_ = fill_  # type: ignore[method-assign]
    try:
        mu.load_grown_(base, run, plan=grown)
    except (mu.MupscaleError, MemoryError) as error:
        return getattr(error, "code", "its own"), "no room" in str(error)
    finally:
        fill.Filler.fill_ = original  # type: ignore[method-assign]
    return "loaded", False


def prefixes() -> str:
    """Ranks that are to load different sets of tensors."""
    model, path = Net(10), folder() / "two"
    if dist.get_rank() == 0:
        with warnings.catch_warnings(action="ignore"):
            save_dcp({"a": model.state_dict(), "b": model.state_dict()}, checkpoint_id=path, no_dist=True)
    dist.barrier()
    try:
        mu.load_grown_(path, sharded(20, plan(10, 2)).model, plan=plan(10, 2), prefix="ab"[dist.get_rank()])
    except mu.MupscaleError as error:
        return error.code
    return "loaded"


def family() -> str:
    """A family plan made inside a job: every rank plans, and all find the same."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=40,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return str(mu.plans.family_plan(config.to_dict(), 2).plan.hash)


class Centred(nn.Module):
    """A stream behind LayerNorm, which a linear layer writes into along its rows."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner, self.up, self.down = nn.Linear(3, n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n)
        self.first, self.last, self.outer = nn.LayerNorm(n), nn.LayerNorm(n), nn.Linear(n, 5)

    def forward(self, x):
        x = self.inner(x)
        return self.outer(self.last(x + self.down(torch.tanh(self.up(self.first(x))))))


def means() -> list[bool]:
    """New channels that carry a mean, from files and from a running base whose rows lie on all ranks: the bits of one process."""
    torch.manual_seed(0)
    base, path, mesh = Centred(10), folder() / "centred", init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == 0:
        with warnings.catch_warnings(action="ignore"):
            save_dcp(base.state_dict(), checkpoint_id=path, no_dist=True)
    dist.barrier()
    x = torch.ones(2, 3)

    def loss(model: Any) -> Any:
        return model(x.to(model.inner.weight)).square().mean()

    want = mu.upscale(base, lambda: Centred(15), loss=loss, seed=5)
    assert want.plan is not None
    assert want.plan["down.weight"].mean == (0,)

    def cut(n: int) -> Any:
        model: Any = mu.plans.on_meta(lambda: Centred(n))
        fully_shard(model, mesh=mesh)
        return model

    same = identity_plan(base)
    found = []
    for source in (path, mu.load_grown_(path, cut(10), plan=same, prove=False)):
        run = mu.load_grown_(source, cut(15), plan=want.plan, noise=mu.NewUnits(), seed=5)
        whole = {name: tensor.full_tensor() for name, tensor in run.model.state_dict().items()}
        found.append(
            all(torch.equal(whole[name], tensor) for name, tensor in want.model.state_dict().items())
        )
    return found


def metadata_shared() -> dict[str, Any]:
    """How often this rank reads a pickle, when tables can be shared, and when they cannot."""
    path, grown = saved(10), plan(10, 2)
    found: dict[str, Any] = {}
    read, written = dcp.read_dcp, node._written
    calls: list[Any] = []
    tables: list[str] = []

    def counted(path: Any) -> Any:
        calls.append(path)
        return read(path)

    def noted(directory: Any) -> str:
        tables.append(written(directory))
        return tables[-1]

    ways = {"shared": noted, "not written": lambda _: "", "not seen": lambda _: "/nowhere/table"}
    node.read_dcp = counted  # type: ignore[attr-defined]
    try:
        for way, write in ways.items():
            node._written = write
            calls.clear()
            run = mu.load_grown_(path, sharded(20, grown), plan=grown)
            bits = [local_of(p).detach().clone() for p in run.model.parameters()]
            found[way] = (len(calls), bits)
        other = folder() / f"copy{dist.get_rank()}"
        shutil.copytree(path, other)
        calls.clear()
        node._written = written
        mu.load_grown_(other, sharded(20, grown), plan=grown)
        found["own copies"] = (len(calls), [])
        found["left"] = [name for name in tables if os.path.exists(name)]
        found["written"] = len(tables)
        (other / ".metadata").write_bytes(b"\x80\x04N.")
        dist.barrier()
        try:
            mu.load_grown_(folder() / "copy0", sharded(20, grown), plan=grown)
        except mu.MupscaleError as error:
            found["damaged"] = error.codes
    finally:
        node.read_dcp, node._written = read, written  # type: ignore[attr-defined]
    return found


def sizes_that_differ() -> str:
    """One rank of a mesh of two dimensions measures other sizes; nobody waits for it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = Net(8)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(int(dist.get_rank() == 3))
    try:
        mu.init_weights_(model, identity_plan(model), std=Net(8))
    except mu.MupscaleError as error:
        return error.code
    return "drawn"


CASES = ["collectives", "what_is_read", "refused", "nothing_is_left"]
CASES += ["gathered", "failing_between_messages", "prefixes", "family", "metadata_shared", "means"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(__name__, CASES, world=2, folder=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    cases = ["what_is_read", "collectives", "sizes_that_differ"]
    return launch(__name__, cases, world=4, folder=tmp_path_factory.mktemp("four"))


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.nightly)])
def some(request):
    return request.getfixturevalue(request.param)


def test_one_collective_agrees_and_none_moves_data(some):
    for counted in some["collectives"]:
        # Before ranks wait for the one that reads; their nodes, their tables, all have opened them; and the last.
        assert counted["files"] == counted["files, mup"] == 5
        assert counted["files, signal"] == 7  # before norms are measured, and their sum
        assert counted["live, aligned"] == counted["live, aligned, mup"] == 1
        assert counted["live, aligned: messages"] == 0
        assert counted["live"] == 2  # before ranks wait for each other's slices, and the last
    # Each boundary that moved costs a message for every tensor it cuts.
    assert sum(counted["live: messages"] for counted in some["collectives"]) > 0


def test_messages_are_those_of_the_boundaries_that_moved():
    """10 rows on 4 ranks lie as 3, 3, 3, 1; their copies as 5, 5, 5, 5."""
    from torch.distributed.tensor import Shard

    base, wide = (Sharding((n,), (4,), (0, 1, 2, 3), (Shard(0),)) for n in (10, 20))
    reads = Reads((mu.rules.Axis.parse("out: 10x2"),))
    assert not is_aligned(base, wide, reads)
    assert [len(messages(base, wide, reads, rank)[1]) for rank in range(4)] == [0, 1, 1, 1]
    sent = [(r, p.start, p.shape) for rank in range(4) for r, p in messages(base, wide, reads, rank)[0]]
    assert sent == [(1, (2,), (1,)), (2, (5,), (1,)), (3, (7,), (2,))]
    even = [Sharding((n,), (4,), (0, 1, 2, 3), (Shard(0),)) for n in (12, 24)]
    assert is_aligned(*even, Reads((mu.rules.Axis.parse("out: 12x2"),)))
    units = (mu.rules.Axis.parse("out: 10+10"),)
    assert [len(messages(base, wide, Reads(units), rank)[1]) for rank in range(4)] == [1, 2, 0, 0], "zeros"
    copied = [len(messages(base, wide, Reads(units, (0,)), rank)[1]) for rank in range(4)]
    assert copied == [1, 2, 2, 2], "units that are copies are received too"


@pytest.mark.nightly
def test_bytes_read_fall_with_the_number_of_ranks(two, four):
    read = {len(of): max(r["bytes"] for r in of) for of in (two["what_is_read"], four["what_is_read"])}
    assert 0.45 < read[4] / read[2] < 0.55
    for rank in two["what_is_read"] + four["what_is_read"]:
        # Three tensors of one base, each a quarter of the wide one: 3/4 of the shard's bytes, and headers.
        assert 0.7 < rank["bytes"] / rank["shards"] < 0.85
        assert rank["beside"] <= rank["shards"] / 4 + (8 << 20)


def test_what_does_not_fit_is_told_on_every_rank_alike(two):
    first, second = two["refused"]
    assert first.keys() == second.keys()
    expected = {
        "another model's plan": ("checkpoint.shape_differs", "model.middle.weight"),
        "another k": ("plan.other_shape", "middle.weight"),
        "another optimizer": ("optimizer.state_of_other_class", "betas"),
        "no such place, on one rank": ("directory.nothing_to_load", "nowhere"),
        "another seed, on one rank": ("rank.other_inputs", ""),
        "missing tensors": ("checkpoint.tensor_missing", "model.middle.bias"),
        "no units": ("optimizer.not_in_units", "AdamW"),
    }
    for way, (code, where) in expected.items():
        codes, message = first[way]
        assert code in codes, (way, first[way])
        assert where in message, (way, first[way])
        if "seed" not in way:
            assert first[way] == second[way], way
        else:
            assert code in second[way][0]


def test_nothing_half_loaded_is_left_and_loading_again_works(two):
    assert two["nothing_is_left"] == [[True, True, True]] * 2


def test_gathered_models_are_filled_where_they_live(two):
    assert two["gathered"] == [[True, True, 12]] * 2


def test_a_rank_that_fails_goes_on_serving_others(two):
    assert two["failing_between_messages"] == [("rank.another_failed", True), ("its own", True)]


def test_ranks_that_name_different_tensors_are_refused(two):
    assert two["prefixes"] == ["rank.other_inputs"] * 2


def test_a_family_plan_is_the_same_on_every_rank(two):
    assert len(set(two["family"])) == 1


def test_means_have_the_bits_of_one_process(two):
    assert two["means"] == [[True, True]] * 2


def test_one_rank_of_a_node_reads_the_metadata(two):
    first, second = two["metadata_shared"]
    assert [way["shared"][0] for way in (first, second)] == [1, 0]
    for alone in ("not written", "not seen", "own copies"):
        assert [way[alone][0] for way in (first, second)] == [1, 1], alone
    for found in (first, second):
        for way in ("not written", "not seen"):
            assert all(torch.equal(a, b) for a, b in zip(found[way][1], found["shared"][1], strict=True))
        assert found["left"] == []
        assert "dcp.malformed_metadata" in found["damaged"]
    assert first["written"] > 0


def test_tensors_are_read_in_the_order_of_files_and_ahead(tmp_path, monkeypatch):
    """Whatever the order of the model; the files that were used last stay open."""
    wide, stored, want = {}, {}, {}
    for number, name in enumerate("cadb"):
        want[name] = torch.arange(6.0).view(2, 3) + number
        (tmp_path / name).write_bytes(b"head" * 2 + want[name].numpy().tobytes())
        wide[name] = torch.empty(2, 3)
        stored[name] = FiledTensor.whole(Place(name, 8, "F32", (2, 3)))
    axes = (mu.rules.Axis.fixed(2), mu.rules.Axis.fixed(3))
    fillings = [fill.Filling(Making(axes), stored[name], wide[name]) for name in wide]
    calls: list[tuple[str, str]] = []
    read, ahead = Reader.read_, Reader.ahead

    def told(self: Any, file: str, *given: Any) -> None:
        calls.append(("ahead", file))
        ahead(self, file, *given)

    def noted(self: Any, file: str, *given: Any) -> None:
        calls.append(("read", file))
        read(self, file, *given)

    monkeypatch.setattr(Reader, "ahead", told)
    monkeypatch.setattr(Reader, "read_", noted)
    monkeypatch.setattr("mupscale.jobs.bytes.blocks._MOST_OPEN", 2)
    source = Source(tmp_path, "", stored)
    fill.Filler(source).fill_all_(fillings)
    assert [file for kind, file in calls if kind == "read"] == ["a", "b", "c", "d"]
    assert calls[:3] == [("ahead", "b"), ("read", "a"), ("ahead", "c")]
    assert all(torch.equal(wide[name], want[name]) for name in want)
    assert list(source._reader._open) == ["c", "d"]
    source._reader.descriptor("c")
    source._reader.descriptor("a")
    assert list(source._reader._open) == ["c", "a"], "d was not used for the longest time"
    source.close()


@pytest.mark.nightly
def test_other_sizes_on_one_rank_stop_all_of_them(four):
    assert four["sizes_that_differ"] == ["init.ranks_differ"] * 4


def test_a_slow_rank_is_waited_for_longer_than_a_collective_waits(tmp_path):
    launched = launch(__name__, ["slow"], world=2, folder=tmp_path, timeout=120)
    assert [whole for whole, _ in launched["slow"]] == [True, True]
    assert any(code == "rank.stopped_or_absent" for _, code in launched["slow"]), "the control must fail"


def test_a_killed_rank_stops_the_others_with_a_word(tmp_path):
    launched = launch(__name__, ["killed"], world=2, folder=tmp_path, timeout=120)
    said = launched.failures["killed"]
    assert "rank 1: exit code -9" in said
    assert "[rank.no_sign_of_life]" in said
    assert "all NaN: True" in said
    again = launch(__name__, ["nothing_is_left"], world=2, folder=tmp_path)
    assert again["nothing_is_left"] == [[True, True, True]] * 2


def test_one_process_is_a_job_of_one_rank(tmp_path):
    model = Net(4)
    with warnings.catch_warnings(action="ignore"):
        save_dcp(model.state_dict(), checkpoint_id=tmp_path / "base")
    wide: Any = mu.load_grown_(tmp_path / "base", mu.plans.on_meta(lambda: Net(8)), plan=plan(4, 2)).model
    x = torch.randn(3, 3)
    assert torch.allclose(wide(x), model(x), atol=1e-6)
    assert local_rectangle(wide.middle.weight).shape == (8, 8)


@pytest.mark.parametrize("key", ["alpha", "eps", "weight_decay"])
@pytest.mark.parametrize("form", ["running", "saved"])
def test_constants_that_differ_from_the_source_s_are_told(form, key, tmp_path):
    """Every constant that the row of the optimizer states is compared; equal ones are the control."""
    since, rmsprop = plan(4, 2), torch.optim.RMSprop
    settings: dict[str, Any] = {"lr": 1e-2, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1}
    base = Net(4)
    optimizer = rmsprop(mu.param_groups(base, identity_plan(base), rmsprop, **settings))
    base(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    source: Any = mu.Run(base, optimizer)
    if form == "saved":
        weights, state = get_state_dict(base, optimizer)
        save_dcp({"model": weights, "optim": state}, checkpoint_id=tmp_path, no_dist=True)
        source = tmp_path
    for factor in (1.0, 0.5):
        wide, other = Net(8), {**settings, key: settings[key] * factor}
        run = mu.Run(wide, rmsprop(mu.param_groups(wide, since, rmsprop, **other)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            mu.load_grown_(source, run, plan=since)
        assert any(f": {key} is " in str(w.message) for w in told) is (factor != 1.0)


def test_arguments_that_do_not_fit_are_refused_before_a_model_is_touched():
    """Control: a load that fails after it has begun leaves NaN."""
    base, wide = Net(4), Net(8)
    before = [parameter.detach().clone() for parameter in base.parameters()]
    for wrong, code in (
        (lambda: mu.load_grown_(mu.Run(wide), mu.Run(base), plan=plan(4, 2)), "plan.other_shape"),
        (lambda: mu.load_grown_(wide, base, plan=plan(4, 2)), "argument.wrong_type"),  # type: ignore[arg-type]
    ):
        refusal(wrong, code)
        assert all(torch.equal(a, b) for a, b in zip(before, base.parameters(), strict=True))
    missing = "no/such/directory"
    refusal(
        lambda: mu.load_grown_(missing, wide, plan=plan(4, 2)), "directory.nothing_to_load", where=missing
    )
    assert all(parameter.isnan().all() for parameter in wide.parameters())


def test_since_may_be_the_run_of_the_base():
    base = Net(4)
    wide = mu.load_grown_(mu.Run(base), Net(8), plan=plan(4, 2), since=mu.Run(base))
    assert wide.since == plan(4, 2)

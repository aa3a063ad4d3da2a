"""No decision depends on the words of a refusal: all of them say the same two words, and everything goes the same way.

`benchmarks/reword.py` changes the words in the source and runs the tests that the change can touch. Here they are changed while the
package runs, remedies among them, and one decision of every kind is compared with what is decided otherwise.
"""

import json
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.refusals import OTHER_WORDS, refusal, refused, reworded
from mupscale.checkpoints.events import Event, Resumed, Writing
from mupscale.cli.main import main
from mupscale.errors import Fault
from mupscale.families import child, process
from mupscale.models.float64 import lifted_casts
from mupscale.planning import infer
from mupscale.planning.search.not_found import NoPlanError
from mupscale.sharded.agreement import _packed, _unpacked

X = torch.arange(12.0).view(4, 3) / 10


class Centred(nn.Module):
    """A norm written out: zeros behind its features change the mean, so that they can only be copied."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        hidden = (hidden - hidden.mean(-1, keepdim=True)) / hidden.std(-1, correction=0, keepdim=True)
        made: Tensor = self.out(hidden)
        return made


def loss(model: nn.Module) -> Tensor:
    value: Tensor = (model(X.to(next(model.parameters()))) - 1).square().mean()
    return value


def mlp(width: int, drop: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Dropout(drop), nn.ReLU(), nn.Linear(width, 2))


def codes(action: Callable[[], Any]) -> tuple[str, ...]:
    """The codes that an action is refused with."""
    with pytest.raises(mu.MupscaleError) as caught:
        action()
    return (type(caught.value).__name__, *caught.value.codes)


def copies_where_units_cannot_be() -> object:
    """Where no plan by new units is exact, the sizes that the refusal carries grow by copies."""
    measured = infer._found

    def found(base: Any, wide: Any, loss: Any, declared: Any, ways: Any, *rest: Any) -> Any:
        if (4, 8) not in ways.copied:
            error = NoPlanError("no exact plan", [Fault("search.no_exact_plan", "3 tried", "nearest: ffn")])
            error.sizes = frozenset({(4, 8)})
            raise error
        return measured(base, wide, loss, declared, ways, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer, "_found", found)
        plan = mu.infer_plan(mlp(4), lambda: mlp(8), by="units", loss=loss)
    return plan.hash, plan["3.weight"].change.c


def search_where_shapes_do_not_decide() -> object:
    torch.manual_seed(0)
    plan = mu.grow(mu.Run(Centred(4)), lambda: Centred(8), loss=loss).plan
    assert plan is not None
    return plan.hash


def a_need_that_is_warned_of() -> object:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grown = mu.grow(mu.Run(mlp(4, 0.5)), lambda: mlp(8, 0.5), loss=loss)
    assert grown.plan is not None
    plan = mu.Plan.from_json(grown.plan.to_json())
    return len(caught), [need.kind for need in plan.needs]


def an_error_inside_float64() -> object:
    """A refusal that is a `ValueError` too, and says "dtype", is not one of torch about dtypes."""

    def refuse() -> None:
        with lifted_casts(mlp(4)):
            raise mu.MupscaleError("the dtype on meta has no data pointer", code="argument.not_a_number")

    return codes(refuse)


def an_error_of_a_factory() -> object:
    """The same, of a value on the meta device."""

    def make() -> nn.Module:
        raise mu.MupscaleError("the dtype on meta has no data pointer", code="argument.not_a_number")

    return codes(lambda: mu.grow(mu.Run(mlp(4)), make))


def errors_of_every_type() -> object:
    wide = nn.Linear(3, 6)
    found = [
        codes(lambda: mu.grow(nn.Linear(3, 4), wide)),
        codes(lambda: mu.grow(mu.Run(Centred(4)), lambda: Centred(8))),
        codes(lambda: mu.grow(mu.Run(mlp(4)), lambda: mlp(8), loss=3)),  # type: ignore[arg-type]
        codes(lambda: mu.Plan.from_json("{}")),
        codes(lambda: mu.upscale(mu.Run(mlp(4)), lambda: mlp(8), mu.SignalNoise(-1.0), loss=loss)),
    ]
    assert len({kind for kind, *_ in found}) == 4
    return found


def what_other_processes_and_ranks_say() -> object:
    """A child's refusal in its file, a rank's in its bytes, a worker's in a pickle."""
    error = refusal(lambda: mu.grow(nn.Linear(3, 4), nn.Linear(3, 6)))
    ways = [
        child.refusal_of(json.loads(json.dumps(child.refusal_answer(error)))),
        _unpacked(_packed(error), 1),
        pickle.loads(pickle.dumps(error)),
    ]
    return [(type(again).__name__, again.codes, [fault.where for fault in again.faults]) for again in ways]


def a_way_out_that_was_tried(patch: pytest.MonkeyPatch) -> object:
    """What a child answers to a growth that is refused: the refusal, and the narrower growth that it has tried."""

    def planned(_: object, asked: str, **__: object) -> None:
        if asked != "ffn=2":
            raise mu.MupscaleError("a tensor shrinks", code="family.tensor_shrinks")

    patch.setattr("mupscale.families.plan.family_plan", planned)
    patch.setattr("mupscale.families.prove.prove", lambda *_: None)
    empty = dict.fromkeys(("to", "export", "architecture", "stored", "declared"))
    return codes(lambda: process.answer({"config": {}, "multipliers": "2", "steps": 1, **empty}))


def test_the_decisions_of_a_live_run_do_not_depend_on_words(monkeypatch):
    decisions: list[Callable[[], object]] = [
        copies_where_units_cannot_be,
        search_where_shapes_do_not_decide,
        a_need_that_is_warned_of,
        an_error_inside_float64,
        an_error_of_a_factory,
        errors_of_every_type,
        what_other_processes_and_ranks_say,
        lambda: a_way_out_that_was_tried(monkeypatch),
    ]
    for decide in decisions:
        usual = decide()
        with reworded():
            assert decide() == usual, decide.__name__


class Stopped(Exception):  # noqa: N818
    """What ends a job in the middle."""


@pytest.mark.usefixtures("planned_here")
def test_the_ways_of_a_job_do_not_depend_on_words(tmp_path):
    """Interrupted, refused to another request, resumed, found complete, damaged, and a base that is another one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")

    def ways(folder: Path) -> list[object]:
        seen: list[Event] = []

        def grow(k: int = 2, on: Callable[[Event], None] = seen.append) -> str:
            return mu.grow_checkpoint(tmp_path / "base", folder / "wide", k, on=on).outcome

        def stop(event: Event) -> None:
            if isinstance(event, Writing):
                raise Stopped

        folder.mkdir()
        with suppress(Stopped):
            grow(on=stop)
        found: list[object] = [sorted(path.name for path in folder.iterdir()), codes(lambda: grow(3))]
        found += [grow(), any(isinstance(event, Resumed) for event in seen), grow(), codes(lambda: grow(3))]
        found.append(
            main(
                [
                    "check",
                    str(folder / "wide"),
                    "--base",
                    str(tmp_path / "base"),
                    "--levels",
                    "bytes",
                    "--quiet",
                ]
            )
        )
        weights = folder / "wide" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        found.append(main(["check", str(folder / "wide"), "--quiet"]))
        found.append(main(["check", str(folder / "wide"), "--base", str(tmp_path / "base"), "--quiet"]))
        return found

    usual = ways(tmp_path / "usual")
    assert usual[2:4] == ["written", True]
    assert usual[4] == "already there"
    assert usual[-3:] == [0, 1, 1], "control: the ways are those of the names"
    with reworded():
        assert ways(tmp_path / "reworded") == usual


def test_a_decision_by_words_is_seen():
    """Control: one that reads a message goes another way; and a refusal inside says other words and nothing else."""

    def decide() -> bool:
        try:
            mu.grow(nn.Linear(3, 4), nn.Linear(3, 6))
        except mu.MupscaleError as error:
            return "grows from" not in str(error)
        return True

    usual = decide()
    with reworded():
        assert decide() != usual
        with refused("axis.not_whole_copies") as caught:
            mu.grow(nn.Linear(3, 4), nn.Linear(3, 6))
    assert {caught.value.claim, *(fault.what for fault in caught.value.faults)} == {OTHER_WORDS}

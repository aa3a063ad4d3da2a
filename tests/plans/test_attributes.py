"""What is not a tensor: settings that follow the width, settings that are carried, and what is refused."""

import random
from collections import deque
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mupscale.plans.attributes import carry_attributes_, compare_attributes


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, n), nn.BatchNorm1d(n)
        self.width, self.scale, self.sizes = n, n**-0.5, (n, 3)
        self.anneal, self.mode, self.flag, self.limit = 1.0, "tanh", False, None


def kinds_of(base, wide):
    return {d.path: d.kind for d in compare_attributes(base, wide) if d.kind != "expected"}


def kinds(change):
    base, wide = Block(4), Block(8)
    change(base)
    return kinds_of(base, wide)


def test_what_follows_the_width_is_expected():
    found = {d.path: d.kind for d in compare_attributes(Block(4), Block(8))}
    names = ("width", "scale", "sizes", "layer.out_features", "norm.num_features")
    assert found == dict.fromkeys(names, "expected")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("anneal", 0.3),
        ("mode", "none"),
        ("flag", True),
        ("limit", 5),
    ],
)
def test_a_value_changed_after_building_is_carried(path, value):
    owner, _, leaf = path.rpartition(".")
    base, wide = Block(4), Block(8)
    setattr(base.get_submodule(owner), leaf, value)
    found = compare_attributes(base, wide)
    assert [d.path for d in found if d.kind == "carried"] == [path]
    carry_attributes_(wide, found)
    assert getattr(wide.get_submodule(owner), leaf) == value
    assert wide.width == 8, "control: what follows the width stays"
    assert not [d for d in compare_attributes(base, wide) if d.kind == "carried"]


def test_hooks_and_tensors_are_refused():
    def hooked(m: nn.Module) -> None:
        m.get_submodule("layer").register_forward_hook(lambda *_: None)

    assert kinds(hooked) == {"layer._forward_hooks": "refused"}
    assert kinds(lambda m: setattr(m, "table", torch.ones(4))) == {"table": "refused"}
    assert kinds(lambda m: None) == {}, "control"


def test_equal_tensor_attributes_are_no_difference():
    base, wide = Block(4), Block(8)
    base.table, wide.table = torch.ones(3), torch.ones(3)
    assert not [d for d in compare_attributes(base, wide) if d.kind != "expected"]
    wide.table = torch.zeros(3)
    assert kinds_of(base, wide) == {"table": "carried"}
    wide.table = torch.ones(6)
    assert kinds_of(base, wide) == {"table": "refused"}


class Counted(nn.Module):
    """State of every kind that a forward may change, besides settings and sizes."""

    def __init__(self, n: int, p: float = 0.1, config: Any = None) -> None:
        super().__init__()
        self.layer, self.p, self.config = nn.Linear(3, n), p, config
        self.first, self.second, self.rows, self.groups = 0, 1, n + 3, 12 // n
        self.table, self.names = {"seen": 1, "width": n}, {"a"}
        self.space, self.recent = SimpleNamespace(t=1), deque([1.0])
        self.numbers = torch.Generator().manual_seed(0)
        self._enlarge()

    def _enlarge(self) -> None:
        self.rows = self.rows + 1

    def forward(self, x: Tensor) -> Any:
        self.first += 1
        self.second += 1
        self.table["seen"] += 1
        self.space.t += 1
        self.recent.append(0.5)
        self.names.add("b")
        if self.config is not None:
            self.config.t = self.config.t + 1
        return self.layer(x) + torch.randn(1, generator=self.numbers)


def test_state_that_a_method_writes_is_carried_and_settings_are_the_factory_s():
    base, wide = (Counted(n, p, Settings(n)) for n, p in ((2, 0.1), (4, 0.3)))
    for _ in range(3):
        base(torch.ones(3))
    found = {d.path: d.kind for d in compare_attributes(base, wide)}
    state = ("first", "second", "table.seen", "space.t", "recent", "names", "config.t", "numbers")
    assert {path for path, kind in found.items() if kind == "carried"} == set(state)
    assert {path for path, kind in found.items() if kind == "kept"} == {"p", "config.rate"}
    carry_attributes_(wide, compare_attributes(base, wide))
    assert (wide.first, wide.second, wide.table, wide.space.t) == (3, 4, {"seen": 4, "width": 4}, 4)
    assert (wide.names, list(wide.recent), wide.config.t) == ({"a", "b"}, [1.0, 0.5, 0.5, 0.5], 3)
    assert torch.equal(wide.numbers.get_state(), base.numbers.get_state())
    assert (wide.p, wide.rows, wide.groups) == (0.3, 8, 3), "settings and sizes are the factory's"
    wide.table["seen"] = 0
    assert base.table["seen"] == 4, "nothing is shared"


class Settings:
    def __init__(self, n: int) -> None:
        self.t, self.width, self.rate = 0, n, 0.1 / n**0.3


@pytest.mark.parametrize(
    ("base", "wide", "matters"),
    [
        (nn.Dropout(0.1), nn.Dropout(0.35), True),
        (nn.Dropout(0.1), nn.Dropout(0.2), True),
        (nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(8), True),
        (nn.Conv1d(4, 4, 3, padding_mode="circular"), nn.Conv1d(8, 8, 3), True),
    ],
)
def test_a_setting_of_a_module_of_torch_is_the_factory_s(base: nn.Module, wide: nn.Module, matters: bool):
    [found] = [d for d in compare_attributes(base, wide) if d.kind != "expected"]
    assert (found.kind, found.matters) == ("kept", matters)


def test_a_method_that_was_replaced_on_an_object_is_a_difference_unless_both_have_it():
    base, wide = Block(4), Block(8)
    base.forward = lambda x: x
    assert kinds(lambda m: setattr(m, "forward", lambda x: x)) == {"forward": "refused"}
    wide.forward = lambda x: x
    assert not [d for d in compare_attributes(base, wide) if d.kind != "expected"], "the factory does it too"


def test_a_count_that_goes_back_is_named_and_a_size_is_not():
    assert kinds(lambda m: setattr(m, "width", 41)) == {"width": "kept"}, "no axis explains 41 -> 8"
    assert kinds(lambda m: setattr(m, "width", 5)) == {}, "control: a size that grows in its own way"


class Slotted:
    __slots__ = ("_taken", "seen")

    def __init__(self) -> None:
        self.seen, self._taken = 1, 1

    def take(self) -> None:
        self.seen += 1
        self._taken += 1


class Held(nn.Module):
    """State that only the training loop writes."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer, self.array, self.count = nn.Linear(3, n), np.zeros(2), np.int64(0)
        self.log: list[Any] = []
        self.pair, self.sums = (torch.zeros(2), 1), {"m": torch.zeros(2), "width": n}
        self.slotted, self.left, self.order = Slotted(), [5, 6, 7], list(range(1, 60))
        self.own, self.units, self.sizes = [self.layer.weight], list(range(n)), np.array([n, 3])


def test_state_in_arrays_tensors_slots_and_lists_is_carried():
    base, wide = Held(4), Held(8)
    assert kinds_of(base, wide) == {"units": "kept"}, "control: what follows the width, and weights in a list"
    base.array += 1
    base.count += 3
    base.log.append((torch.ones(2) * base.layer.weight[0, 0]).detach())
    base.log.append(torch.ones(2) * base.layer.weight[0, 0])
    base.pair, base.sums["m"] = (torch.ones(2), 1), torch.ones(2)
    base.slotted.take()
    base.left.pop(0)
    base.order.reverse()
    base.layer.weight.no_decay = True  # type: ignore[attr-defined]
    names = ("array", "count", "log", "pair", "sums.m", "slotted.seen", "slotted._taken", "left", "order")
    assert kinds_of(base, wide) == {
        **dict.fromkeys((*names, "layer.weight.no_decay"), "carried"),
        "units": "kept",
    }
    carry_attributes_(wide, compare_attributes(base, wide))
    assert kinds_of(base, wide) == {"units": "kept"}
    assert (wide.slotted.seen, wide.left, wide.order, wide.sums["width"]) == (2, [6, 7], base.order, 8)
    assert (wide.own[0] is wide.layer.weight, len(wide.units), wide.sizes.tolist()) == (True, 8, [8, 3])
    base.array += 1
    assert wide.array.tolist() == [1, 1], "nothing is shared"


def test_what_cannot_be_carried_is_named():
    base, wide = Held(4), Held(8)
    base.units, wide.units = [], []
    base.log.append(torch.ones(4))
    base.layer.weight.sums = torch.ones(4, 3)  # type: ignore[attr-defined]
    vars(base)["tracker"] = Slotted()
    assert kinds_of(base, wide) == {"log": "refused", "layer.weight.sums": "kept", "tracker": "kept"}


def test_lists_of_a_deeper_model_have_its_length():
    def make(depth: int) -> Any:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))
        model.kinds = ["full"] * depth  # type: ignore[assignment]
        return model

    assert kinds_of(make(2), make(3)) == {"kinds": "kept"}
    base = make(2)
    base.kinds = ["full"] * 7
    assert kinds_of(base, make(3)) == {"kinds": "carried"}, "control: 7 blocks are in neither model"


class Configured(nn.Module):
    def __init__(self, cfg: Any, second: Any) -> None:
        super().__init__()
        self.layer, self.config, self.other = nn.Linear(3, cfg.width), cfg, SimpleNamespace(**vars(second))


def test_a_configuration_under_another_name_than_its_argument_is_the_factory_s():
    base, wide = (Configured(*[SimpleNamespace(width=n, rate=r)] * 2) for n, r in ((4, 0.1), (8, 0.35)))
    assert kinds_of(base, wide) == {"config.rate": "kept", "other.rate": "carried"}, "control: a copy is none"


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_shuffled_list_is_one_difference(kind: str):
    def seconds(count: int) -> float:
        rows: list[Any] = [{"number": i, "word": str(i)} for i in range(count)]
        base, wide = Block(4), Block(8)
        vars(wide)["rows"] = rows if kind == "list" else dict(enumerate(rows))
        random.Random(0).shuffle(shuffled := list(rows))
        vars(base)["rows"] = shuffled if kind == "list" else dict(enumerate(shuffled))
        start = process_time()
        assert kinds_of(base, wide) == {"rows": "carried"}
        return process_time() - start

    assert seconds(16_000) < 40 * seconds(1_600), "linear: quadratic time is 100 times"

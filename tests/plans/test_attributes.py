"""What is not a tensor: settings that follow the width, settings that are carried, and what is refused."""

from collections import deque
from types import SimpleNamespace
from typing import Any

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


def kinds(change):
    base, wide = Block(4), Block(8)
    change(base)
    return {d.path: d.kind for d in compare_attributes(base, wide) if d.kind != "expected"}


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
    assert [d.path for d in compare_attributes(base, wide) if d.kind == "refused"] == ["table"]


class Counted(nn.Module):
    """State of every kind that a forward may change, beside settings and sizes."""

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

"""What is not a tensor: settings that follow the width, settings that are carried, and what is refused."""

import pytest
import torch
from torch import nn

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
        ("norm.eps", 0.1),
        ("norm.momentum", None),
        ("anneal", 0.3),
        ("mode", "none"),
        ("flag", True),
        ("limit", 5),
    ],
)
def test_a_setting_changed_after_building_is_carried(path, value):
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

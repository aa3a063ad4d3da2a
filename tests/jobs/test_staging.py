"""Host buffers in front of a device, with a device that says when it has read."""

import torch

from mupscale.jobs.bytes.staging import Staging


class Copied:
    """A copy that is under way until somebody waits for it."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


class FarAway(Staging):
    """The staging of a device that copies on its own: meta tensors, which hold nothing, stand for its memory."""

    def __init__(self):
        super().__init__(torch.device("meta"))
        self.copies = []

    def _event(self):
        self.copies.append(Copied())
        return self.copies[-1]


def test_a_buffer_is_filled_again_only_when_its_copy_has_been_made():
    staging = FarAway()
    places = set()
    for turn in range(4):
        room = staging.room(torch.float32, (4, 8))
        places.add(room.data_ptr())
        assert [copy.waited for copy in staging.copies] == [1] * max(0, turn - 1) + [0] * min(turn, 1)
        moved = staging.on_device(room)
        assert moved.device.type == "meta"
        assert moved.shape == (4, 8)
    assert len(places) == 2
    assert staging.room_bytes == 2 * 4 * 8 * 4


def test_a_buffer_grows_and_keeps_its_memory():
    staging = Staging(torch.device("cpu"))
    staging.room(torch.float32, (10,))
    assert staging.room_bytes == 40
    small = staging.room(torch.bfloat16, (3,))
    assert small.shape == (3,)
    assert staging.room_bytes == 40
    assert staging.room(torch.float64, (10, 2)).shape == (10, 2)
    assert staging.room_bytes == 160

"""`mu.same`: the door to the comparison of two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from ..files.strict import system_errors
from ..jobs.progress import Report
from ..jobs.threads import check_threads
from ..storage.location import Location
from .compare import compare
from .grown import grown_pair
from .profiles import profile_of
from .read import config_at, read_snapshot
from .report import Same
from .stepped import Ways


def same(
    a: Location | Path | str,
    b: Location | Path | str,
    *,
    profile: str = "strict",
    threads: int = 1,
    config: Location | Path | str | None = None,
    batch: Mapping[str, Tensor] | Path | str | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
) -> Same:
    """Tell whether two checkpoints, of the same or of different formats, continue the same run.

    Compared are weights, float32 copies, moments, step counts, settings of groups, schedule and random states, by name. Tensors
    are read in blocks, and nothing of a pickle is executed.

    Args:
        a: The checkpoint that a run had, in any format.
        b: The checkpoint that should continue it, in any format.
        profile: How far they may be apart: "strict" (bit for bit), "standard" or "relaxed".
        threads: How many threads read.
        config: The model's `config.json`, or its directory. For names of Megatron or torchtitan where neither checkpoint tells the
            sizes of heads.
        batch: Inputs by name, or a file of them. The stock model is run on them with the weights of both; the losses, and how
            far gradients and one step of the optimizer are apart, are in `measured`.
        model: A function that builds a model of your own, in place of the stock one.
        loss: `loss(model)`, which is measured in place of a batch.

    Returns:
        What differs, and what it does to training. It is true if nothing does; what the checkpoints do not tell is listed
        too, and makes it false. In a test write `assert report, str(report)`; its text lists every difference.

    Raises:
        MupscaleError: If a checkpoint cannot be read, or an argument cannot be used.

    >>> import mupscale as mu, tempfile, torch
    >>> model = torch.nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": model.state_dict()}, f"{folder}/a.ckpt")
    ...     torch.save({"state_dict": {"weight": 2 * model.weight, "bias": model.bias}}, f"{folder}/b.ckpt")
    ...     resaved, changed = mu.same(f"{folder}/a.ckpt", f"{folder}/a.ckpt"), mu.same(f"{folder}/a.ckpt", f"{folder}/b.ckpt")
    >>> bool(resaved), changed.verdict, [fault.code for fault in changed.differences]
    (True, 'different', ['same.weight_differs'])
    """
    return reported(a, b, profile, threads, config=config, ways=Ways.of(batch, model, loss))


def reported(
    a: Location | Path | str,
    b: Location | Path | str,
    profile: str,
    threads: int,
    report: Report | None = None,
    config: Location | Path | str | None = None,
    ways: Ways | None = None,
) -> Same:
    """The same with a callback for progress."""
    chosen = profile_of(profile)
    check_threads(threads)
    with system_errors():
        model_config = None if config is None else config_at(config)
        one, other = read_snapshot(a), read_snapshot(b)
        found = grown_pair(one, other, chosen, threads, report)
        return (
            found if found is not None else compare(one, other, chosen, threads, report, model_config, ways)
        )

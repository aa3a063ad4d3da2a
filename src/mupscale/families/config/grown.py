"""The wide configuration of a goal, or the reasons why there is none that is exact."""

from __future__ import annotations

from ..models import Config, as_data, config_from
from .checks import check_growth
from .goal import Goal
from .nested import edits, with_edits


def grown(config: Config, goal: Goal) -> Config:
    """The wide configuration; raises an error that names every width that cannot grow like this."""
    data = as_data(config)
    check_growth(data, goal)
    return config_from(with_edits(data, edits(data, goal)))

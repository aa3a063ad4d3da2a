"""Wide jobs in accelerate and in Lightning start from a narrow checkpoint, and their losses are the base's."""

import pytest

from harness.engines import CONTROLS, ENGINES, measure
from harness.torchrun import gaps_of

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("engine", ENGINES)
def test_wide_jobs_go_on_like_the_base(engine):
    """Controls: the engine's own groups and norm; in Lightning, `mu.clip_before_step_`, which clips nothing there."""
    pytest.importorskip(engine)
    gaps = gaps_of(measure(engine))
    for job, gap in gaps.items():
        assert gap > 1e-3 if job in CONTROLS else gap < 1e-5, job
    assert "wide" in gaps
    assert CONTROLS[0] in gaps

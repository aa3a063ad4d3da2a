"""What a user of another device does, as small functions of a device. `CASES` has all of them by name."""

from harness.devices import diagnostics, factories, growth, optimizers, pages, places, zoo
from harness.devices.case import Case

GROUPS = (
    pages.case, growth.case, factories.case, optimizers.case, diagnostics.case, places.case, places.default,
    zoo.case, zoo.huggingface,
)  # fmt: skip
CASES: dict[str, Case] = {case.name: case for group in GROUPS for case in group.cases}
assert len(CASES) == sum(len(group.cases) for group in GROUPS), "two cases have one name"

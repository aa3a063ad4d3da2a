"""The checkpoint that grows, with everything that is known of it: each file is read once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..families.record import FamilyPlan
from ..files.directory import Directory, read_directory
from ..plans.plan import Plan
from ..runs.growth_record import plans_of, read_about
from ..runs.provenance import Provenance
from ..storage.location import Location
from .shards import Spelling, StoredTensor, stored_plan, stored_tensors


@dataclass(frozen=True)
class Base:
    """A Hugging Face directory, here or at a URL, that is the base of a growth."""

    path: Location
    weights_needed: bool = True
    """Whether a directory without weights, of which a plan can be made, is refused."""
    _found: dict[tuple[str, tuple[str, ...]], list[StoredTensor]] = field(default_factory=dict, compare=False)

    @cached_property
    def directory(self) -> Directory:
        return read_directory(self.path, weights_needed=self.weights_needed)

    @cached_property
    def about(self) -> dict[str, Any] | None:
        """The record of its own growth; None for a base that was not grown."""
        return read_about(self.path)

    @cached_property
    def early(self) -> Plan | None:
        """The plan from the reference to it; None for a base that is its own reference."""
        return None if self.about is None else plans_of(self.about, self.path)[1]

    @cached_property
    def history(self) -> Provenance:
        """The growths that led to it; empty for a base that was not grown."""
        return Provenance.from_json(self.about or {})

    def tensors(self, plan: Plan, spelling: Spelling, written: Collection[str] = ()) -> list[StoredTensor]:
        """Where the tensors of a plan lie; raises unless all are there, in the shapes of the configuration.

        Tensors that are stored under two names are compared byte by byte, so this is done once for a plan.
        """
        key = plan.hash, tuple(written)
        if key not in self._found:
            self._found[key] = stored_tensors(plan, self.directory, spelling, written)
        return self._found[key]

    def check_stored(self, family: FamilyPlan) -> None:
        """Raise unless the directory holds what the plan needs."""
        if self.directory.weights:
            self.tensors(stored_plan(family), Spelling.of(family))

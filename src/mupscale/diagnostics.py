"""Measurements of a run: the numbers of growth, the learning rate at the reference, coordinates, certificates, provenance."""

from typing import TYPE_CHECKING

from .lazy import exported

if TYPE_CHECKING:
    from .errors import Fault as Fault  # not listed
    from .noise.resolve import resolve_noise as resolve_noise  # not listed
    from .proofs.certificate import Certificate as Certificate  # not listed
    from .runs.provenance import Growth as Growth  # not listed
    from .runs.provenance import Provenance as Provenance  # not listed
    from .sharded.verify import verify_sharded as verify_sharded
    from .trainers.going_on import read_provenance as read_provenance
    from .training.check.coordinates import Coordinates as Coordinates  # not listed
    from .training.check.coordinates import coordinate_check as coordinate_check
    from .training.check.growth_numbers import growth_numbers as growth_numbers
    from .training.rates.reference import reference_lr as reference_lr

__getattr__ = exported(__name__)

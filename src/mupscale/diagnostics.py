"""Measurements of a run: norms at the reference, symmetry of copies, what is awake, noise, coordinates, certificates."""

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
    from .training.check.symmetry import awake as awake
    from .training.check.symmetry import noise_shares as noise_shares
    from .training.check.symmetry import symmetry as symmetry
    from .training.rates.reference import reference_lr as reference_lr
    from .training.units.clip import grad_norm as grad_norm

__getattr__ = exported(__name__)

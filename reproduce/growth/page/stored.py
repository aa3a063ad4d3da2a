"""What is stored of everything: the studies of width, and the Llama and the Mixtral that get blocks and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..book import Book
from ..choose import Known
from ..questions import directions
from ..spec import Spec
from ..studies import STUDIES, directions_trainer
from .directions import missing


@dataclass(frozen=True)
class Stored:
    """The books of the studies, the MLP first, and what is known of stock models."""

    books: Sequence[Book]
    known: Known = lambda spec: None
    """Of the Llama and the Mixtral."""
    dense: directions.Sizes = field(default_factory=directions.Sizes)
    larger: directions.Sizes = directions.LARGER
    order: directions.Sizes = directions.ORDER
    mixture: directions.Sizes = directions.MIXTURE
    specs: Sequence[Spec] = ()
    """Every stored run."""

    def book(self, name: str) -> Book | None:
        return next((book for book in self.books if book.name == name), None)

    def missing(self) -> Iterator[str]:
        """What the pages cite and is not stored."""
        for book in self.books:
            yield from (
                f"{line}{'' if book is self.books[0] else f' ({book.name})'}" for line in book.missing()
            )
        yield from missing(self.known, (self.dense, self.larger, self.mixture))


def stored() -> Stored:
    """What is stored in the repository."""
    trainers = {name: study.trainer() for name, study in STUDIES.items()}
    stock = directions_trainer()
    books = [Book.of(study, trainers[name]) for name, study in STUDIES.items()]
    specs = [spec for trainer in (*trainers.values(), stock) for spec, _ in trainer.all()]
    return Stored(books, stock.known, specs=specs)

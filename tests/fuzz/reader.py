"""A reader: a function of bytes, inputs that it accepts, and the modules whose paths atheris explores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS: Final = Path(__file__).with_name("corpus")


@dataclass(frozen=True, slots=True)
class Reader:
    """``read`` returns whether it accepts the bytes; any exception is a defect. It accepts each of ``seeds``."""

    name: str
    read: Callable[[bytes], bool]
    seeds: Callable[[], list[bytes]]
    modules: tuple[str, ...]

    @property
    def corpus(self) -> Path:
        """The directory of inputs that were defects."""
        return CORPUS / self.name

    def found(self) -> list[Path]:
        """Return the inputs of the corpus."""
        return sorted(path for path in self.corpus.glob("*") if path.is_file())

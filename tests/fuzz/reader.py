"""What is fuzzed: a function of bytes, inputs that it accepts, and the modules whose paths are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS: Final = Path(__file__).with_name("corpus")


@dataclass(frozen=True, slots=True)
class Reader:
    """``read`` says whether it accepts the bytes; whatever it raises is a defect. It accepts each of ``seeds``."""

    name: str
    read: Callable[[bytes], bool]
    seeds: Callable[[], list[bytes]]
    modules: tuple[str, ...]

    @property
    def corpus(self) -> Path:
        """Where the inputs lie that once were a defect."""
        return CORPUS / self.name

    def found(self) -> list[Path]:
        """The inputs of the corpus."""
        return sorted(path for path in self.corpus.glob("*") if path.is_file())

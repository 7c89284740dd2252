"""All readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.fuzz import checkpoints, pages_and_records, texts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fuzz.reader import Reader

READERS: Final[Mapping[str, Reader]] = {
    reader.name: reader for reader in (*pages_and_records.READERS, *checkpoints.READERS, *texts.READERS)
}

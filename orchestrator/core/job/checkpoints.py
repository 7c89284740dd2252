"""What a job's record holds of its checkpoints: the newest, and the newest on storage."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint, which may lie in the memory of a rank actor."""

    step: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A checkpoint on storage. ``digest`` is that of the newest file that the script wrote by itself; "" where there is none."""

    step: int
    at: float
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The newest checkpoint of a job, and the newest on storage, often the same."""

    newest: Saved
    durable: Durable | None = None

    @property
    def without_memory(self) -> Checkpoints | None:
        """What is left when the actors are gone that had the newest in memory; None when that is nothing."""
        if self.durable is None:
            return None
        return replace(self, newest=Saved(step=self.durable.step, at=self.durable.at))

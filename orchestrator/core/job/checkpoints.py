"""The checkpoints in a job's record: the newest, and the newest on storage."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.core.codec import Integer, Number, Record, Text, Time


class Saved(Record):
    """A complete checkpoint, perhaps only in the memory of a rank actor."""

    step: Integer
    at: Time


class Durable(Record):
    """A checkpoint on storage. ``digest`` is that of the newest file that the script wrote by itself; "" without one.

    ``every`` are the seconds since the one before it, which the same attempt wrote; None for the first.
    """

    step: Integer
    at: Time
    path: Text
    digest: Text = ""
    every: Number | None = None


class Checkpoints(Record):
    """The newest checkpoint of a job, and the newest on storage, often the same. Raises ValueError for the second alone.

    ``step`` and ``at`` are those of the newest, the others of the newest on storage; steps are 0, times
    None and the path is empty before the first.
    """

    newest: Saved | None = None
    durable: Durable | None = None

    def __post_init__(self) -> None:
        if self.newest is None and self.durable is not None:
            raise ValueError("a job with a checkpoint on storage has a newest checkpoint")

    @property
    def without_memory(self) -> Checkpoints:
        """Return what is left when the actors with the newest one in memory are gone."""
        if self.durable is None:
            return Checkpoints()
        return replace(self, newest=Saved(step=self.durable.step, at=self.durable.at))

    @property
    def step(self) -> int:
        """Return the step of the newest, which may be in the memory of a rank actor."""
        return self.newest.step if self.newest is not None else 0

    @property
    def at(self) -> float | None:
        """Return when the newest was saved."""
        return self.newest.at if self.newest is not None else None

    @property
    def path(self) -> str:
        """Return the path of the newest on storage."""
        return self.durable.path if self.durable is not None else ""

    @property
    def digest(self) -> str:
        """Return the digest of the newest on storage, where the script wrote it by itself."""
        return self.durable.digest if self.durable is not None else ""

    @property
    def durable_step(self) -> int:
        """Return the step of the newest on storage."""
        return self.durable.step if self.durable is not None else 0

    @property
    def durable_every(self) -> float | None:
        """Return the seconds between the newest two on storage."""
        return self.durable.every if self.durable is not None else None

    @property
    def durable_at(self) -> float | None:
        """Return when the newest on storage was saved."""
        return self.durable.at if self.durable is not None else None

"""The attempt that a rank's actor serves: calls that name an older one are refused."""

from __future__ import annotations


class StaleAttemptError(Exception):
    """The call names an attempt that a newer one has replaced; nothing was done. Ask for the current attempt."""


class AttemptFence:
    """Refuses calls that name an older attempt than ``attempt``, the current one.

    ``launched`` is the newest attempt that started its process, or was cancelled before; ``called_off`` is the newest
    attempt that was ordered to end.
    """

    def __init__(self, job_id: str, rank: int) -> None:
        self._job_id = job_id
        self._rank = rank
        self.attempt = 0
        self.launched = 0
        self.called_off = 0

    @property
    def ends_by_order(self) -> bool:
        """Whether the current attempt was ordered to end."""
        return self.called_off >= self.attempt

    def refuse_older(self, attempt: int) -> None:
        """Raise StaleAttemptError for an attempt that a newer one has replaced."""
        if attempt < self.attempt:
            raise StaleAttemptError(
                f"{self._job_id} rank {self._rank}: attempt {attempt} was replaced by {self.attempt}; nothing was done"
            )

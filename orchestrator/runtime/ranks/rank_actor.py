"""The Ray actor of a rank. It serves one gang at a time, and may serve another when nothing of the job is left in it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Final

from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.names import gang_name
from orchestrator.runtime.ranks.actor import RankService
from orchestrator.runtime.ranks.fence import StaleAttemptError
from orchestrator.runtime.ranks.process.footprint import Footprint

RETIRED_SECONDS: Final = 60.0
"""Time after which an unused retired actor ends; a daemon that was not killed takes or removes it much sooner."""

SETTLE_SECONDS: Final = 1.0
SETTLE_INTERVAL_SECONDS: Final = 0.02


class RankActor:
    """Ray actor of a rank. Every call names the gang that it is for: one that arrives late must not reach the next job.

    The next gang has another job's id, but the same rank on the same node, and the same reservation.
    """

    def __init__(self, *, job_id: str, gang: int, rank: int, node_dir: str, attempt: int, leased: bool) -> None:
        linux.adjust_oom_score(0)  # Ray's own setting, on a cluster that is not orch's, would make it the first victim
        self._rank, self._node_dir, self._leased = rank, Path(node_dir), leased
        self._umask = _umask()
        self._clean = Footprint.now()
        self._retirement: asyncio.TimerHandle | None = None
        self._user = ""
        self._begin(job_id, gang, attempt)

    def _begin(self, job_id: str, gang: int, attempt: int) -> None:
        self._user = gang_name(job_id, gang)
        self._service = RankService(
            job_id=job_id, rank=self._rank, node_dir=self._node_dir, attempt=attempt, leased=self._leased
        )

    async def serve(self, user: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of ``RankService`` for gang ``user``. Raises StaleAttemptError if the actor serves another."""
        self._refuse_others(user)
        return await getattr(self._service, method)(*args, **kwargs)

    async def retire(self, user: str) -> tuple[str, ...]:
        """End the service of ``user`` after its ranks' end; return what is left of its job. Raises StaleAttemptError.

        Where nothing is left, the actor may serve another gang. It ends if none takes it within RETIRED_SECONDS.
        """
        self._refuse_others(user)
        self._user = ""
        left = await self._service.retire()
        os.umask(self._umask)
        left += await self._grown()
        if not left:
            self._retirement = asyncio.get_running_loop().call_later(RETIRED_SECONDS, os._exit, 0)
        return left

    async def _grown(self) -> tuple[str, ...]:
        """Return what the actor holds beyond its start. Waits: a rank's log stays open for a moment after its end."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := self._clean.grown()) and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel reports no closed file
            await asyncio.sleep(SETTLE_INTERVAL_SECONDS)
        return left

    async def take(self, job_id: str, gang: int, attempt: int) -> None:
        """Serve this gang from now on. Raises StaleAttemptError unless the actor has retired and left nothing."""
        if self._retirement is None:
            self._refuse_others(gang_name(job_id, gang))
            return
        self._retirement.cancel()
        self._retirement = None
        self._begin(job_id, gang, attempt)

    def _refuse_others(self, user: str) -> None:
        if user != self._user:
            now = self._user or "no gang"
            raise StaleAttemptError(f"the actor of rank {self._rank} serves {now}, not {user}; nothing was done")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

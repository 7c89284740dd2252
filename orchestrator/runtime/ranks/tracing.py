"""Takes a torch.profiler trace of a rank: requests it from the training loop and waits for it. Does not use Ray."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from orchestrator.train.script import profiling
from orchestrator.train.script.profiling import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.train.script.progress_reading import PageReader

_POLL_SECONDS: Final = 0.05


async def take_trace(page: PageReader, rank: int, steps: int, seconds: float, over: Callable[[], bool]) -> bytes:
    """Return a trace of the next ``steps`` steps, gzipped JSON. Raises TraceRefusedError, also when ``over`` is true."""
    base = page.path
    if not profiling.listens(base, page.read().writer_pid):
        raise TraceRefusedError(
            f"rank {rank} runs no training loop of orchestrator.train, or has not reached it yet: `orch profile` needs"
            " MultiGPUTrainingManager; in a loop of your own, use torch.profiler"
        )
    profiling.request(base, steps)
    try:
        return await _wait_for(page, rank, seconds, over)
    finally:
        profiling.withdraw(base)


async def _wait_for(page: PageReader, rank: int, seconds: float, over: Callable[[], bool]) -> bytes:
    deadline = time.monotonic() + seconds
    asked = profiling.beside(page.path, profiling.REQUEST_SUFFIX)
    while True:
        ended, pending = over(), asked.exists()  # read before the trace, which the script writes first
        try:
            data = await asyncio.to_thread(profiling.collect, page.path)
        except OSError as error:
            raise TraceRefusedError(f"rank {rank} left a trace that cannot be read: {error.strerror}") from error
        if data is not None:
            return data
        if ended:
            raise TraceRefusedError(f"rank {rank} ended before the trace was complete: ask for fewer steps")
        if not pending:
            raise TraceRefusedError(
                f"rank {rank} could not write the trace: free shared memory, ask for fewer steps, or wait until a"
                " profiler of the script's own is not in use"
            )
        if time.monotonic() > deadline:
            raise TraceRefusedError(
                f"rank {rank} did not complete the steps within {seconds:g} s: ask for fewer, allow more time, or, where the"
                " script runs a profiler of its own, wait until that has ended"
            )
        await asyncio.sleep(_POLL_SECONDS)

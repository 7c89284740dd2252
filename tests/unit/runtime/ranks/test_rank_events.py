"""Events of a rank's actor arrive as they were."""

from __future__ import annotations

from orchestrator.core.codec import from_bytes, to_bytes
from orchestrator.core.events import Exit, MemoryUse
from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.core.states import OutOf, StopScope
from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply, RankEvent

END = Exit(
    rank=0,
    at=2.5,
    exit_code=None,
    signal=9,
    error_type="E",
    error_message="m",
    error_at=2.25,
    log_tail=("a", "b"),
    policy="fail",
    policy_note=PoliciesLeftOut(pattern="x"),
    missing_file="f",
    stop_seen_at=2.0,
    stop_scope=StopScope.RANK,
    last_step=3,
    total_steps=4,
    memory=MemoryUse(used_bytes=5, limit_bytes=6, killed=OutOf.LIMIT),
)
EVENTS = (
    RankEvent(number=1, kind="started", at=1.5, pid=7, cold="asked for"),
    RankEvent(number=2, kind="exited", at=2.5, exit=END),
    RankEvent(number=3, kind="gone", at=3.5),
)


def test_events_arrive_as_they_were() -> None:
    reply = PollReply(cursor=PollCursor(event=3), events=EVENTS)
    assert from_bytes(PollReply, to_bytes(reply)) == reply

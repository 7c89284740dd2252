"""Events of a rank's actor are compatible across versions: a restarted daemon follows the running attempts."""

from __future__ import annotations

import pickle
from base64 import b64decode

from orchestrator.core.events import Exit, MemoryUse
from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.core.states import OutOf, StopScope
from orchestrator.runtime.ranks.rank_events import PollReply, RankEvent

REPLY_OF_AN_EARLIER_VERSION = (
    b"gAWVAQIAAAAAAACMJm9yY2hlc3RyYXRvci5ydW50aW1lLnJhbmtzLnJhbmtfZXZlbnRzlIwJUG9sbFJlcGx5lJOUKYGUXZQoaACM"
    b"ClBvbGxDdXJzb3KUk5QpgZRdlChLA0sASwBlYmgAjAlSYW5rRXZlbnSUk5QpgZRdlChLAYwHc3RhcnRlZJRHP/gAAAAAAABLB4wJ"
    b"YXNrZWQgZm9ylE5OjACUaA9OKSloD05oD05OTk5OZWJoCimBlF2UKEsCjAZleGl0ZWSUR0AEAAAAAAAASwBOTksJjAFFlIwBbZRH"
    b"QAIAAAAAAACMAWGUjAFilIaUKYwEZmFpbJSMHW9yY2hlc3RyYXRvci5jb3JlLmZhY3RzLm5vdGVzlIwPUG9saWNpZXNMZWZ0T3V0"
    b"lJOUKYGUXZQojAF4lE5oD2VijAFmlEdAAAAAAAAAAIwYb3JjaGVzdHJhdG9yLmNvcmUuc3RhdGVzlIwJU3RvcFNjb3BllJOUjARy"
    b"YW5rlIWUUpRLA0sEjBhvcmNoZXN0cmF0b3IuY29yZS5ldmVudHOUjAlNZW1vcnlVc2WUk5QpgZRdlChLBUsGaCCMBU91dE9mlJOU"
    b"jAVsaW1pdJSFlFKUZWJlYmgKKYGUXZQoSwOMBGdvbmWUR0AMAAAAAAAASwBOTk5oD2gPTikpaA9OaA9OTk5OTmVih5ROTk5lYi4="
)
"""Pickled by an actor of a version in which events had the fields of an end beside their own."""

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


def test_an_actor_of_an_earlier_version_is_understood() -> None:
    reply = pickle.loads(b64decode(REPLY_OF_AN_EARLIER_VERSION))
    assert isinstance(reply, PollReply)
    assert (reply.cursor.event, reply.events) == (3, EVENTS)


def test_what_this_version_tells_arrives() -> None:
    assert pickle.loads(pickle.dumps(EVENTS)) == EVENTS

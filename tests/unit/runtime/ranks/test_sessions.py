"""The environment of a command that runs beside a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from orchestrator.runtime.ranks.session_messages import CommandRequest, Terminal
from orchestrator.runtime.ranks.sessions import session_environment

PLAN = cast(
    "Any",
    SimpleNamespace(
        env={
            "RANK": "1",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "HF_TOKEN": "hf-secret",
            "URL": "https://me:hf-secret@host/",
            "ORCH_PROGRESS_PATH": "/dev/shm/page",
            "ORCH_SNAPSHOT_DIR": "/dev/shm/snapshots",
            "ORCH_CHECKPOINT_DIR": "/checkpoints",
        },
        secrets=("hf-secret", ""),
    ),
)
OTHERS = {"RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1", "ORCH_CHECKPOINT_DIR": "/checkpoints"}


def test_the_job_s_own_user_has_the_secrets_and_never_what_is_the_rank_s_alone() -> None:
    env = session_environment(PLAN, CommandRequest(argv=(), terminal=None, secrets=True))
    assert env == {**OTHERS, "HF_TOKEN": "hf-secret", "URL": "https://me:hf-secret@host/"}


def test_others_have_no_variable_that_holds_a_secret() -> None:
    terminal = Terminal(rows=1, columns=1, kind="xterm")
    env = session_environment(PLAN, CommandRequest(argv=(), terminal=terminal, secrets=False))
    assert env == {**OTHERS, "TERM": "xterm"}

"""A refused submission leaves nothing, whatever step failed; what submissions under way need is not removed."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import DiskFailedError, DiskFullError, NoSuchJobError, OrchError, RefusedError
from orchestrator.api.protocol import Verb
from orchestrator.daemon.requests.pruning import Pruning
from orchestrator.daemon.submitting import submission
from orchestrator.daemon.submitting.under_way import REMOVED, remove_unaccepted
from orchestrator.runtime.pools import Pools
from orchestrator.store import errors as store_errors
from orchestrator.store.records import DiskTrouble
from tests.unit.daemon.requests.test_requests import ADA, YAML, Desk, on_a_desk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.api.requests import SubmitRequest

HELD = YAML.replace("working_dir: null", "working_dir: .") + "hold: true\n"


def files(desk: Desk) -> list[str]:
    """Return every file and job's directory of the home."""
    paths = desk.settings.paths
    return sorted(
        str(path.relative_to(paths.home))
        for path in (*paths.jobs.rglob("*"), *paths.blobs.rglob("*"))
        if not path.is_dir() or path.parent == paths.jobs
    )


def asked(desk: Desk, folder: Path, content: str, **fields: Any) -> SubmitRequest:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(content)
    return desk.request(HELD, cwd=str(folder), **fields)


def prunes(desk: Desk) -> Pruning:
    return Pruning(desk.rounds.store, desk.settings.paths, Pools().removals, set, desk.under_way)


STEPS: dict[str, tuple[object, str]] = {
    "archive": (submission.archives, "take"),
    "working copy": (submission.archives, "lay_out"),
    "secrets": (submission, "write_secrets"),
    "sync": (submission, "sync_directory"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, DiskFullError, "is full"),
        (errno.EIO, DiskFailedError, "fails with input/output errors"),
        (errno.EROFS, DiskFailedError, "is mounted read-only"),
        (errno.EACCES, RefusedError, "could not be written"),
    ],
)
def test_nothing_is_left_whatever_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int, kind: type[OrchError], said: str
) -> None:
    where, name = STEPS[step]
    whole: Callable[..., Any] = getattr(where, name)

    def fails(*arguments: Any, **fields: Any) -> None:
        whole(*arguments, **fields)
        raise OSError(code, os.strerror(code))

    async def story(desk: Desk) -> None:
        await desk.submissions.submit(asked(desk, tmp_path / "work", "first"), ADA)
        before = files(desk)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fails)
            with pytest.raises(kind, match=said):
                await desk.submissions.submit(asked(desk, tmp_path / "work", "second", idempotency_key="other"), ADA)
        assert files(desk) == before

    on_a_desk(tmp_path, story)


@pytest.mark.parametrize("unknown", [False, True], ids=["refused", "unknown"])
def test_what_the_store_refuses_is_gone_and_what_it_may_have_kept_stays(tmp_path: Path, unknown: bool) -> None:
    async def story(desk: Desk) -> None:
        path = desk.settings.paths.store

        async def refuses(_: object) -> Any:
            if unknown:
                raise store_errors.OutcomeUnknownError(path)
            raise store_errors.refused_by_disk(path, "so nothing new is accepted", DiskTrouble.NO_INODES)

        desk.rounds.store.submit_all = refuses  # type: ignore[method-assign]
        with pytest.raises(DiskFailedError if unknown else DiskFullError) as refused:
            await desk.submissions.submit(asked(desk, tmp_path / "work", "first"), ADA)
        assert ("may or may not have kept it" if unknown else "has no inodes left") in str(refused.value)
        assert bool(files(desk)) is unknown

    on_a_desk(tmp_path, story)


def test_a_blob_that_another_submission_uses_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(desk: Desk) -> None:
        first = asked(desk, tmp_path / "work", "same")
        prepare = submission.prepare

        async def accepted_meanwhile(*arguments: Any, **fields: Any) -> Any:
            monkeypatch.setattr(submission, "prepare", prepare)
            await desk.submissions.submit(asked(desk, tmp_path / "work", "same", idempotency_key="other"), ADA)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(submission, "prepare", accepted_meanwhile)
        with pytest.raises(DiskFullError):
            await desk.submissions.submit(first, ADA)
        kept = [name for name in files(desk) if name.startswith("blobs/")]
        assert len(kept) == 2, "the manifest and the file"
        await prunes(desk).sweep()
        assert [name for name in files(desk) if name.startswith("blobs/")] == kept

    on_a_desk(tmp_path, story)


def test_blobs_that_no_job_names_are_removed(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        one = await desk.submissions.submit(asked(desk, tmp_path / "work", "one"), ADA)
        two = await desk.submissions.submit(asked(desk, tmp_path / "work", "two", idempotency_key="two"), ADA)
        draft = desk.settings.paths.blobs / "sha256" / "ab" / ".abcdef01.0123.new"
        draft.parent.mkdir(exist_ok=True)
        draft.write_text("half")
        assert one.job_id is not None
        await desk.act(one.job_id, Verb.CANCEL)  # type: ignore[arg-type]
        await prunes(desk).prune(older_than_seconds=-1e9, dry_run=False)
        left = files(desk)
        assert len([name for name in left if name.startswith("blobs/")]) == 2
        assert [name for name in left if name.count("/") == 1] == [f"jobs/{two.job_id}"]

    on_a_desk(tmp_path, story)


def test_a_daemon_removes_what_one_before_it_had_not_accepted(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        paths = desk.settings.paths
        accepted = (await desk.submissions.submit(asked(desk, tmp_path / "work", "one"), ADA)).job_id
        for name in ("under-way-aaaaaa", f"{REMOVED}old-aaaaaa", "of-another-record-aaaaaa"):
            (paths.jobs / name / "work").mkdir(parents=True)
        paths.laid_out("of-another-record-aaaaaa").write_text("boot")
        assert set(remove_unaccepted(paths, {str(accepted)})) == {"under-way-aaaaaa", f"{REMOVED}old-aaaaaa"}
        assert {path.name for path in paths.jobs.iterdir()} == {accepted, "of-another-record-aaaaaa"}

    on_a_desk(tmp_path, story)


def test_prune_keeps_what_a_submission_under_way_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(desk: Desk) -> None:
        first = (await desk.submissions.submit(asked(desk, tmp_path / "work", "one"), ADA)).job_id
        assert first is not None
        await desk.act(first, Verb.CANCEL)  # type: ignore[arg-type]
        archive, pruned = submission.archive, asyncio.Event()

        async def pruned_meanwhile(*arguments: Any) -> Any:
            assert (await prunes(desk).prune(older_than_seconds=-1e9, dry_run=False)).removed == ()
            pruned.set()
            return await archive(*arguments)

        monkeypatch.setattr(submission, "archive", pruned_meanwhile)
        request = asked(desk, tmp_path / "work", "two", idempotency_key="two", after=(f"{first}:any",))
        second = await desk.submissions.submit(request, ADA)
        assert (pruned.is_set(), second.created) == (True, True)
        assert (await desk.reader.record(first)).id == first  # type: ignore[arg-type]

    on_a_desk(tmp_path, story)


def test_a_job_that_is_being_pruned_is_needed_by_no_new_submission(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first = (await desk.submissions.submit(asked(desk, tmp_path / "work", "one"), ADA)).job_id
        assert first is not None
        await desk.act(first, Verb.CANCEL)  # type: ignore[arg-type]
        desk.under_way.pruned.add(first)  # type: ignore[arg-type]
        request = asked(desk, tmp_path / "work", "two", idempotency_key="two", after=(f"{first}:any",))
        with pytest.raises(RefusedError, match="is being removed by `orch prune`"):
            await desk.submissions.submit(request, ADA)
        desk.under_way.pruned.clear()
        assert (await prunes(desk).prune(older_than_seconds=-1e9, dry_run=False)).removed == (first,)
        with pytest.raises(NoSuchJobError):
            await desk.reader.record(first)  # type: ignore[arg-type]

    on_a_desk(tmp_path, story)

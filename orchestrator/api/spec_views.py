"""API views of specs, differences of two jobs, and stacks of ranks. Only the standard library is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.api.view import NESTED, View


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutView(View):
    """Files that ``.gitignore`` and ``.orchignore`` exclude from the workdir archive; ``by`` names the ignore files.

    ``largest`` names some of the largest. ``more``: there are more files than were counted. ``links_out`` links to places
    outside of the working directory are copied as links; ``links`` names some, with their targets.
    """

    files: int
    size_bytes: int
    by: tuple[str, ...]
    largest: tuple[str, ...] = ()
    more: bool = False
    links_out: int = 0
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GitView(View):
    """Git state of the working directory at submission; ``dirty``: its files were not those of ``commit``."""

    commit: str
    branch: str = ""
    dirty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecView(View):
    """Spec of a job, as it was resolved at submission.

    ``spec`` has every key of job.yaml, ``yaml`` is the same as text. ``command`` is what a rank executes, ``env`` what the job adds to
    the daemon's environment. Values that look like secrets are ``***``; ``masked`` names them. ``archive`` is the digest of the
    workdir archive, empty without one. ``git`` is None if the directory is in no repository.
    """

    job_id: str
    name: str
    user: str
    submitted_at: float
    spec: dict[str, Any]
    yaml: str
    python: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    masked: tuple[str, ...] = ()
    archive: str = ""
    git: GitView | None = None
    resume_from: str | None = None
    rerun_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange(View):
    """A key for which two jobs have different values; None if a job does not have the key."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange(View):
    """A file of the workdir archives that differs: ``change`` is added, removed or changed."""

    path: str
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDiff(View):
    """Differences of the second job from the first. ``more_files`` counts the changed files that are not listed.

    ``files_unknown`` says why files could not be compared; empty if they were.
    """

    before: str
    after: str
    values: tuple[ValueChange, ...] = ()
    files: tuple[FileChange, ...] = ()
    more_files: int = 0
    files_unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadView(View):
    """One Python thread; ``frames`` as ``function (file:line)``, the innermost first."""

    name: str
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStacksView(View):
    """A rank's process at this moment: ``state`` is the kernel's letter, ``waits_in`` the kernel function of its wait.

    ``threads`` begins with the training thread; ``problem`` says why there are none.
    """

    rank: int
    pid: int | None = None
    state: str = ""
    cpu_seconds: float = 0.0
    waits_in: str = ""
    threads: tuple[ThreadView, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksView(View):
    """Stacks of each rank of a job."""

    job_id: str
    ranks: tuple[RankStacksView, ...]


NESTED.update(
    {
        SpecView: {"git": GitView},
        SpecDiff: {"values": ValueChange, "files": FileChange},
        StacksView: {"ranks": RankStacksView},
        RankStacksView: {"threads": ThreadView},
    }
)

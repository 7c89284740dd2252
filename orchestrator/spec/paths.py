"""Every file name under `ORCH_HOME`, in one class; no other module joins paths below it.

    home/store.sqlite3          the store
    home/page.key, page.port    the key that signs the page's cookies; the port that the page had last
    home/page.signed-out        how often each user has signed out of the page
    home/audit.jsonl            requests that changed something, or were to; audit.jsonl.1 and so on are older ones
    home/reserve                space reserved for the records of running jobs when the disk is full
    home/reserve-start/         space and inodes reserved for the start of a daemon and of its Ray when the disk is full
    home/blobs/sha256/ab/abcd…  working directory archives, by digest
    home/estimates.jsonl        estimates of jobs' remaining time, and when the jobs ended
    home/searches/ID/           plan.json study.json secrets of a search (daemon/searches.py has its names)
    home/run/                   orch.sock, daemon.lock, daemon.json, daemon.log, failure.json, token
    home/ray/                   the embedded Ray's own files
    home/jobs/ID/               laid-out work/ modules/ logs/ checkpoints/ exits/ outputs/ telemetry/ report/ metrics.jsonl secrets

Names only: nothing here creates, reads or removes a file. Standard library only: the command line imports it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_JOB_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")


def is_job_id(text: str) -> bool:
    """Whether the text can be a job's id, and so the name of its directory."""
    return _JOB_ID.fullmatch(text) is not None


def exit_record_name(rank: int) -> str:
    """Return the file name of a rank's exit record."""
    return f"rank-{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFiles:
    """Files of the page: `key` signs its cookies (without it, browsers sign in again); `port` has the port it had last.

    `signed_out` counts how often each user has signed out: cookies from before that are refused.
    """

    key: Path
    port: Path
    signed_out: Path

    @classmethod
    def of(cls, home: Path) -> PageFiles:
        """Return the files of this home."""
        return cls(key=home / "page.key", port=home / "page.port", signed_out=home / "page.signed-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Places of all files. `socket` may be outside `home`, because a socket's path is at most 107 bytes."""

    home: Path
    socket: Path

    @property
    def store(self) -> Path:
        """The SQLite file; its -wal and -shm are beside it."""
        return self.home / "store.sqlite3"

    @property
    def reserve(self) -> Path:
        """The reserve file, removed when the disk is full."""
        return self.home / "reserve"

    @property
    def audit(self) -> Path:
        """The audit log; its older files are beside it."""
        return self.home / "audit.jsonl"

    @property
    def start_reserve(self) -> Path:
        """The directory that is removed when a daemon starts on a full disk: its files take space and inodes."""
        return self.home / "reserve-start"

    @property
    def blobs(self) -> Path:
        """The directory of content-addressed archives."""
        return self.home / "blobs"

    def blob(self, digest: str) -> Path:
        """Return the path of one archive, by its SHA-256 in hexadecimal digits.

        Raises:
            ValueError: not hexadecimal digits.

        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"not a digest: {digest!r}")
        return self.blobs / "sha256" / digest[:2] / digest

    @property
    def run(self) -> Path:
        """The directory of the daemon's own files, such as its socket, lock, state and log."""
        return self.home / "run"

    @property
    def daemon_state(self) -> Path:
        """The daemon's description of itself: process id, version, ports, Ray's address."""
        return self.run / "daemon.json"

    @property
    def daemon_failure(self) -> Path:
        """The error that ended the newest daemon: its process id and a problem document."""
        return self.run / "failure.json"

    @property
    def daemon_log(self) -> Path:
        """The daemon's own log, when it runs in the background."""
        return self.run / "daemon.log"

    @property
    def token(self) -> Path:
        """The token for access over TCP, mode 0600."""
        return self.run / "token"

    @property
    def ray(self) -> Path:
        """The embedded Ray's own directory."""
        return self.home / "ray"

    @property
    def jobs(self) -> Path:
        """The directory of all jobs."""
        return self.home / "jobs"

    def job(self, job_id: str) -> Path:
        """Return one job's directory.

        Raises:
            ValueError: not a job's id. Ids come over the network, and this one must not lead out of the home.

        """
        if not is_job_id(job_id):
            raise ValueError(f"not a job's id: {job_id!r}")
        return self.jobs / job_id

    def work(self, job_id: str) -> Path:
        """Return the directory of the job's writable copy of its working directory, shared by its attempts."""
        return self.job(job_id) / "work"

    def laid_out(self, job_id: str) -> Path:
        """Return the file that says in which boot of the machine the job's files were laid out; written when it was accepted."""
        return self.job(job_id) / "laid-out"

    def modules(self, job_id: str) -> Path:
        """Return the directory of the job's copies of what `runtime_env.py_modules` names."""
        return self.job(job_id) / "modules"

    def logs(self, job_id: str) -> Path:
        """Return the directory of the job's logs."""
        return self.job(job_id) / "logs"

    def checkpoints(self, job_id: str) -> Path:
        """Return the directory of the job's checkpoints, which is used where the job file names no other."""
        return self.job(job_id) / "checkpoints"

    def outputs(self, job_id: str) -> Path:
        """Return the directory into which the files that the job's `outputs` name are copied."""
        return self.job(job_id) / "outputs"

    def exits(self, job_id: str) -> Path:
        """Return the directory of the job's exit records."""
        return self.job(job_id) / "exits"

    def exit_record(self, job_id: str, attempt: int, rank: int) -> Path:
        """Return the exit record of one rank of one attempt, written by the rank's keeper."""
        return self.attempt_exits(job_id, attempt) / exit_record_name(rank)

    def attempt_exits(self, job_id: str, attempt: int) -> Path:
        """Return the directory of the exit records of one attempt."""
        return self.exits(job_id) / f"attempt-{attempt}"

    def metrics(self, job_id: str) -> Path:
        """Return the file to which the job's reported metrics are appended, one JSON object a line."""
        return self.job(job_id) / "metrics.jsonl"

    def secrets(self, job_id: str) -> Path:
        """Return the file with the values of the job's secrets, mode 0600, removed at the job's end."""
        return self.job(job_id) / "secrets"

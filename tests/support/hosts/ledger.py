"""Ledger of jobs with ranks on several hosts: a file on a shared disk. The order of its lines counts, not the hosts' clocks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tests.support.hosts.cluster import SHARED
from tests.support.ledger import SCRIPT, Ledger, job_spec

if TYPE_CHECKING:
    from tests.support.hosts.cluster import HostCluster
    from tests.support.ledger import Line

PLACE: Final = f"{SHARED}/ledger"


class SharedLedger(Ledger):
    """A ledger on the hosts' shared disk. Every line is appended as a whole; ``at`` is its position in the file."""

    def __init__(self, cluster: HostCluster) -> None:
        super().__init__(cluster.head.outside(PLACE))
        self.cluster = cluster

    def lines(self, job: str) -> list[Line]:
        """Return every line of a job so far."""
        return [replace(line, at=float(number)) for number, line in enumerate(super().lines(job))]

    def stored(self, job: str) -> dict[int, int]:
        """Return each attempt's newest step that the daemon recorded as stored; a snapshot in memory is lost with its host."""
        found: dict[int, int] = defaultdict(int)
        for event in self.cluster.events(job):
            body = event["body"]
            if event["kind"] == "checkpoint_saved" and body["path"]:
                found[body["attempt"]] = max(found[body["attempt"]], body["step"])
        return found

    def submit(self, name: str, *, ranks: int, spec: dict[str, Any], **options: Any) -> str:
        """Submit a job that keeps this ledger; it saves to the shared disk, and ends once ``done`` was called with its name."""
        where = {"until": f"{SHARED}/{name}.done", **options}
        whole = {"checkpoint": {"storage_path": f"{SHARED}/{name}"}, **spec}
        text = job_spec(Ledger(self.path.__class__(PLACE)), name=name, ranks=ranks, spec=whole, **where)
        return self.cluster.submit_text(text, train=SCRIPT)

    def done(self, name: str) -> None:
        """Tell a job to end."""
        self.cluster.head.run("touch", f"{SHARED}/{name}.done")

    def steps(self, job_id: str, attempt: int, ranks: int) -> bool:
        """Whether every rank of an attempt has done a step."""
        return (
            len({line.rank for line in self.lines(job_id) if line.attempt == attempt and line.what == "step"}) == ranks
        )

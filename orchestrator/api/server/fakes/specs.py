# ruff: noqa: D102 - JobService documents the methods
"""The part of the in-memory service that serves specs and files of jobs and links to a page; see ``testing.py``."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.api.page_links import PageLinkView
from orchestrator.api.server.fakes.uploads import FakeUploads
from orchestrator.api.spec_views import SpecDiff, SpecView, ValueChange

if TYPE_CHECKING:
    from orchestrator.api.files import FileReader
    from orchestrator.api.service import Caller
    from orchestrator.api.views import JobView
    from orchestrator.core.ids import JobId

PYTHON = "/usr/bin/python3"
PAGE = "http://127.0.0.1:8270/"


class FakeSpecs(FakeUploads):
    """Serves specs in which every job runs ``train.py``; two jobs differ only in their names."""

    _jobs: dict[JobId, JobView]

    @cached_property
    def files_of(self) -> dict[JobId, FileReader]:
        """Files of jobs; a test sets them."""
        return {}

    async def spec(self, job_id: JobId) -> SpecView:
        job = self._jobs[job_id]
        return SpecView(
            job_id=job.id,
            name=job.name,
            user=job.user,
            submitted_at=job.submitted_at,
            spec={"name": job.name, "entrypoint": "python train.py"},
            yaml=f"name: {job.name}\nentrypoint: python train.py\n",
            python=PYTHON,
            command=(PYTHON, "train.py"),
        )

    async def diff(self, before: JobId, after: JobId) -> SpecDiff:
        names = (self._jobs[before].name, self._jobs[after].name)
        values = () if names[0] == names[1] else (ValueChange(key="name", before=names[0], after=names[1]),)
        return SpecDiff(before=before, after=after, values=values)

    async def job_files(self, job_id: JobId) -> FileReader:
        return self.files_of[job_id]

    def link(self, caller: Caller) -> PageLinkView:
        return PageLinkView(url=f"{PAGE}signin?link={caller.user}", address=PAGE, valid_seconds=600.0)

"""Makes the event that submits a further trial of a search, from the archive of an earlier one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.api.service import Caller
from orchestrator.daemon.sharing.admission import check_queue
from orchestrator.daemon.submitting.checking import Checked
from orchestrator.daemon.submitting.submission import check_fits, prepare_rerun
from orchestrator.spec.job import parse_trial
from orchestrator.train.trainer.config.check import trainer_findings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.events import JobSubmitted, MatrixCell
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.search.plan import SearchPlan
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.settings import Settings


async def prepare_trial(
    base: Job,
    plan: SearchPlan,
    cell: MatrixCell,
    secrets: Mapping[str, str],
    loop: Loop,
    settings: Settings,
    files: Pool,
    under_way: UnderWay,
) -> JobSubmitted:
    """Lay out the files of a trial at ``cell``, as ``base``'s were. Raises SpecError, RefusedError, OSError.

    The conditions that the first trials waited for (`depends_on`, `start_at`, `hold`) do not apply.
    """
    spec = parse_trial(
        plan.yaml,
        cell.values,
        source=plan.source,
        overrides=plan.overrides,
        rules=(trainer_findings,),
        environ=plan.passed,
    )
    spec = replace(spec, hold=False, start_at=None)
    check_fits(Checked(spec=spec, python=base.submission.python, directory=None), loop.nodes)
    check_queue(spec, loop.shares.sharing)
    who = base.submission
    caller = Caller(uid=who.uid, gid=-1, user=who.user, is_owner=False)
    event = await prepare_rerun(
        base, spec, caller, settings, secrets, None, files=files, at=loop.now(), under_way=under_way
    )
    return replace(event, matrix=cell, rerun_of=None)

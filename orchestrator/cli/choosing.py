"""Chooses jobs by properties, for `status` and for commands on several jobs: user, states, labels, name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.api.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session

ME = "me"


class Choice(NamedTuple):
    """The typed conditions, which must all be met. A text of ``states`` may name several, as in ``running,failed``."""

    user: str | None = None
    states: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    name: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was typed."""
        return not (self.user or self.states or self.labels or self.name)


def wanted_states(texts: Sequence[str]) -> list[str]:
    """Return states from ``--state running,failed``; ``all`` gives an empty list, which means every state."""
    names = [name.strip().upper() for text in texts for name in text.split(",") if name.strip()]
    return [] if "ALL" in names else names


def user_name(session: Session, user: str | None) -> str | None:
    """Return the user name; ``me`` is the user that the daemon sees for this command."""
    if user != ME:
        return user
    if not session.endpoint.socket_path:
        return session.client().health().owner
    import os
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def with_labels(jobs: Sequence[JobView], labels: Sequence[str], name: str | None) -> tuple[JobView, ...]:
    """Return the jobs with every label (``key=value``, or ``key`` for any value) and a name that matches ``name``."""
    wanted = [_label(text) for text in labels]
    return tuple(
        job
        for job in jobs
        if (name is None or fnmatchcase(job.name, name))
        and all(key in job.labels and value in {None, job.labels[key]} for key, value in wanted)
    )


def _label(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    if not key:
        raise BadRequestError(f"--label {text!r} has no key", hint="--label team=a, or --label team for any value")
    return key, value if equals else None


def chosen_jobs(session: Session, choice: Choice, default_states: Sequence[str]) -> tuple[JobView, ...]:
    """Return the matching jobs, oldest first; in ``default_states`` if no state was typed."""
    states = wanted_states(choice.states) if choice.states else list(default_states)
    found = session.client().jobs(user=user_name(session, choice.user), states=states).jobs
    return tuple(reversed(with_labels(found, choice.labels, choice.name)))


def job_or_matrix(client: Client, ref: str) -> JobView | MatrixView:
    """Return the job or the matrix of a reference. Raises NotFoundError, AmbiguousReferenceError."""
    from orchestrator.api.errors import AmbiguousReferenceError, NotFoundError

    name = ref.rpartition("/")[2]  # of USER/NAME
    try:
        job = client.job(ref)
    except (NotFoundError, AmbiguousReferenceError) as error:
        matrix = client.find_matrix(ref)
        # Jobs of a matrix often have its name as a prefix: the whole name is the matrix, a part of it stays ambiguous.
        if matrix is None or (isinstance(error, AmbiguousReferenceError) and name not in (matrix.name, matrix.id)):
            raise
        return matrix
    if name != job.name or name == job.id:
        return job
    return client.find_matrix(ref) or job

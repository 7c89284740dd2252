"""A daemon that serves a group: members can connect, see every job and act on their own; other users cannot connect."""

from __future__ import annotations

import grp
import os
import shutil
import stat
import subprocess
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Imported here, because a process that has become another user may not be able to read this Python's files.
from orchestrator.api.client import Client
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.core.ids import JobId
from tests.support.stack import ORCH, PATIENCE_SECONDS, Stack, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GROUP = "users"
OWNER, MEMBER, ANOTHER, STRANGER = 65534, 23451, 23452, 23453
# The account may read the Python of these tests, which may be below root's home.
AS_OWNER = (
    *("setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", f"--groups={grp.getgrnam(GROUP).gr_gid}"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
JOB = "name: theirs\nentrypoint: sleep 1000\nresources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 0.1}}\n"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, to become different users"
)


def as_user(uid: int, action: Callable[[], object], *, member: bool = True) -> str:
    """Run ``action`` in a process of user ``uid``; return its result, or the name and message of its error, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([grp.getgrnam(GROUP).gr_gid] if member else [])
            os.setgid(uid)
            os.setuid(uid)
            try:
                said = str(action())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, said
    return said


class OwnedStack(Stack):
    """A stack whose daemon runs as an account that is not root, and a member of the group."""

    def orch(
        self, *arguments: str, seconds: float = PATIENCE_SECONDS, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*AS_OWNER, *ORCH, *arguments],
            env={**self.environ, "HOME": str(self.home), "USER": "nobody"},
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Yield a daemon that serves the group, in a home of mode 0700 with files that have modes readable by any user."""
    home = Path(tempfile.mkdtemp(prefix="orch-t-", dir="/var/lib"))
    os.chown(home, OWNER, OWNER)
    made = OwnedStack(home=home, extra=("--group", GROUP))
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (home / "left-open").write_text("a secret of the owner")
    (home / "left-open").chmod(0o644)
    (home / "jobs").mkdir(mode=0o755)
    for made_by_root in (home / "left-open", home / "jobs"):
        os.chown(made_by_root, OWNER, OWNER)
    try:
        made.up()
        yield made
    finally:
        made.close()
        shutil.rmtree(home, ignore_errors=True)


def client(stack: Stack) -> Client:
    return Client(Endpoint(socket_path=str(stack.settings.socket)), environ={"PATH": "/usr/bin:/bin"})


def submit(stack: Stack, uid: int) -> str:
    return as_user(uid, lambda: client(stack).submit_text(JOB, cwd="/srv").job_id)


def test_members_get_in_and_strangers_do_not(stack: Stack) -> None:
    assert as_user(MEMBER, lambda: client(stack).health().ready) == "True"
    assert as_user(STRANGER, lambda: client(stack).health(), member=False).startswith("NotPermittedError")


def test_members_see_every_job_and_cancel_their_own(stack: Stack) -> None:
    theirs = submit(stack, MEMBER)
    assert theirs.startswith("theirs-")
    assert as_user(ANOTHER, lambda: client(stack).job(theirs).id) == theirs
    for act in (
        lambda: client(stack).cancel(theirs),
        lambda: client(stack).pause(theirs),
        lambda: client(stack).update(theirs, priority=99),
        lambda: client(stack).stacks(theirs),
    ):
        assert as_user(ANOTHER, act).startswith("NotPermittedError")
    ours = submit(stack, ANOTHER)  # of the same name: it is what the name means to its user
    assert "ActionReply" in as_user(MEMBER, lambda: client(stack).cancel("theirs"))
    assert as_user(ANOTHER, lambda: client(stack).job("theirs").id) == ours
    assert as_user(OWNER, lambda: client(stack).job("theirs")).startswith("NoSuchJobError: you have no job 'theirs'")
    assert "ActionReply" in as_user(OWNER, lambda: client(stack).cancel(f"{ANOTHER}/theirs"))
    for job_id in (theirs, ours):
        wait_until(
            "it is cancelled", lambda j=job_id: as_user(MEMBER, lambda: client(stack).job(j).state) == "CANCELLED"
        )


def test_the_daemon_and_its_nodes_are_the_owner_s(stack: Stack) -> None:
    (name,) = as_user(OWNER, lambda: " ".join(node.name for node in client(stack).nodes())).split()
    assert as_user(MEMBER, lambda: client(stack).shutdown()).startswith("NotPermittedError")
    assert as_user(MEMBER, lambda: client(stack).prune(older_than_seconds=0)).startswith("NotPermittedError")
    assert as_user(MEMBER, lambda: client(stack).node_action(name, "cordon")).startswith("NotPermittedError")


def test_members_can_pass_through_the_home_and_open_nothing_in_it(stack: Stack) -> None:
    paths = stack.settings.paths
    assert as_user(MEMBER, lambda: os.listdir(paths.home)).startswith("PermissionError")
    assert as_user(MEMBER, lambda: os.listdir(paths.run)).startswith("PermissionError")
    assert as_user(MEMBER, lambda: os.listdir(paths.jobs)).startswith("PermissionError")
    for file in (paths.home / "left-open", paths.store, paths.daemon_log):
        assert as_user(MEMBER, lambda file=file: file.read_bytes()).startswith("PermissionError"), file
    assert as_user(STRANGER, lambda: os.stat(paths.socket), member=False).startswith("PermissionError")


def test_a_job_that_closes_its_own_directories_hides_nothing_and_keeps_no_secret(stack: Stack) -> None:
    text = """
name: closed
entrypoint: bash -c "mkdir -p ../report; chmod 000 ../report; chmod 500 .."
working_dir: null
secrets: [TOKEN_OF_MINE]
resources: {resources_per_worker: {gpu: 0}}
"""

    def submitted() -> str:
        endpoint = Endpoint(socket_path=str(stack.settings.socket))
        member = Client(endpoint, environ={"PATH": "/usr/bin:/bin", "TOKEN_OF_MINE": "hush"})
        return member.submit_text(text, cwd="/srv").job_id

    job_id = as_user(MEMBER, submitted)
    wait_until("it has ended", lambda: as_user(MEMBER, lambda: client(stack).job(job_id).state) == "SUCCEEDED")
    assert as_user(OWNER, lambda: client(stack).job(job_id).report) == ""
    wait_until("its secrets are gone", lambda: not stack.settings.paths.secrets(JobId(job_id)).exists())

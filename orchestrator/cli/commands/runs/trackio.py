"""`orch trackio`: the local dashboard of Trackio, opened at a job's project."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from orchestrator.analysis.trackers.names import TRACKERS
from orchestrator.api.errors import EXIT_OK, BadRequestError, RefusedError
from orchestrator.cli.commands.shared import Job
from orchestrator.cli.session import Session
from orchestrator.parts import install_line


def show_trackio(
    job: Job,
    url: Annotated[bool, typer.Option("--url", help="Print the address alone, and open no browser.")] = False,
) -> int:
    """Serve Trackio's dashboard for a job with `trackers: [trackio]` from this machine's files, until Ctrl-C."""
    session = Session()
    view = session.client().job(job)
    found = next((tracker for tracker in view.trackers if tracker.name == "trackio"), None)
    if found is None:
        raise BadRequestError(f"{view.id} is not in Trackio", hint="write trackers: [trackio] in its job.yaml")
    folder, project = found.facts.get("folder", ""), found.facts.get("project", "")
    if not project:
        raise RefusedError(
            f"{view.id} has nothing in Trackio yet" + (f": {found.problem}" if found.problem else ""),
            hint=f"see the trackers of `orch status {view.id}`",
        )
    if TRACKERS["trackio"].missing():
        raise RefusedError("trackio is not installed here", hint=install_line("trackio"))
    os.environ["TRACKIO_DIR"] = folder  # read when trackio is imported
    return _serve(session, project, browser=not url)


def _serve(session: Session, project: str, *, browser: bool) -> int:
    import contextlib
    import io
    import threading
    import webbrowser

    import trackio

    with contextlib.redirect_stdout(io.StringIO()):  # trackio prints the address in a sentence, twice
        server, _, _, address = trackio.show(project, open_browser=False, block_thread=False)
    session.console.print(address)
    session.console.out.flush()
    if browser:
        webbrowser.open(address)
    session.console.note("Ctrl-C ends it")
    try:
        threading.Event().wait()
    finally:
        server.close()
    return EXIT_OK

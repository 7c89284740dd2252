"""`orch port-forward`: forward local ports to the node of a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Job, ended_in_order
from orchestrator.cli.session import Session
from orchestrator.cli.status_view import note_which


def port_forward(
    job: Job,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="[LOCAL:]PORT...", help="A port of the job; LOCAL: its number here, 0 for a free one."),
    ],
    *,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="On the node of this rank.")] = 0,
    address: Annotated[
        str, typer.Option("--address", metavar="ADDRESS", help="The address of this machine to listen on.")
    ] = "127.0.0.1",
) -> int:
    """Make ports of a running job reachable here, such as TensorBoard's (6006) or Jupyter's (8888).

    Runs until Ctrl-C, or until the job has ended.
    """
    from orchestrator.cli.sessions.forwarding import Forwarding

    pairs = [parse_ports(text) for text in ports]
    session = Session()
    client = session.client()
    found = client.job(job)
    note_which(session, job, found)
    with ended_in_order(), Forwarding(client, found.id, rank, session.console) as forwarding:
        for local, remote in pairs:
            where = forwarding.listen(address, local, remote)
            session.console.print(f"http://{where} is port {remote} of rank {rank} of {found.id}; Ctrl-C ends this")
        session.console.flush()
        forwarding.run()
    return EXIT_OK


def parse_ports(text: str) -> tuple[int, int]:
    """Return the local port and that of the job. Raises BadRequestError."""
    local, colon, remote = text.rpartition(":")
    numbers = (local if colon else remote, remote)
    if not all(number.isascii() and number.isdecimal() and int(number) <= 65535 for number in numbers) or not int(
        remote
    ):
        raise BadRequestError(f"{text!r} is not a port", hint="write 6006, or 8080:6006 for another port here")
    return int(numbers[0]), int(remote)

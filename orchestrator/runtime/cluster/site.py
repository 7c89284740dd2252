"""Where a cluster's things are: names and directories, from the home and the address alone."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.private_files import remove_private
from orchestrator.runtime.names import namespace
from orchestrator.runtime.nodes.directories import fork_socket, make_node_directory, node_directory, page_directory

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.spec.paths import Paths

LONGEST_RAY_DIRECTORY = 40
"""Ray makes Unix sockets below it, whose paths are at most 107 bytes; about 60 of them are Ray's own."""


@dataclass(frozen=True, slots=True)
class Site:
    """``address`` None: an embedded head, on this machine."""

    paths: Paths
    address: str | None
    namespace: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", namespace(self.paths.home))

    @property
    def embedded(self) -> bool:
        """The cluster is this daemon's own: one node, on this machine."""
        return self.address is None

    def node_dir(self, node_id: str) -> Path:
        """A node's directory. The embedded head's outlives it: fork servers and locks are found again by the next one."""
        return node_directory(self.namespace, "local" if self.embedded else node_id)

    @property
    def head_file(self) -> Path:
        """The record of the embedded head's processes."""
        return self.paths.ray / "head.json"

    @property
    def home_token(self) -> Path:
        """Among the jobs: their directory is all of the home that other nodes have to share."""
        return self.paths.jobs / ".home-token"

    @property
    def fork_socket(self) -> Path:
        """The socket of the fork server that is begun beside a new head."""
        return fork_socket(self.node_dir("local"), sys.executable)

    def ray_directory(self) -> Path:
        """Where Ray makes its sockets and logs. See head.py."""
        wanted = self.paths.ray / "s"
        if len(os.fsencode(wanted)) <= LONGEST_RAY_DIRECTORY:
            return wanted
        return make_node_directory(self.namespace, "ray")

    def remove_node_state(self) -> None:
        """Remove sockets, locks and pages of a head that has ended: nothing is left that they could belong to."""
        remove_private(self.node_dir("local").parent)
        remove_private(page_directory(self.namespace))

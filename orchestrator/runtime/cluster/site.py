"""Names and directories of a cluster, derived from the home and the address alone."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.private_files import remove_private
from orchestrator.runtime.names import namespace
from orchestrator.runtime.nodes.directories import (
    LOCAL,
    fork_socket,
    make_node_directory,
    node_directory,
    page_directory,
)

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.spec.paths import Paths

LONGEST_RAY_DIRECTORY = 40
"""Ray creates Unix sockets below it, whose paths are at most 107 bytes; Ray's part takes about 60 of them."""


@dataclass(frozen=True, slots=True)
class Site:
    """The names and directories. ``address`` None: an embedded head, on this machine."""

    paths: Paths
    address: str | None
    namespace: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", namespace(self.paths.home))

    @property
    def embedded(self) -> bool:
        """Whether the cluster is this daemon's own: one node, on this machine."""
        return self.address is None

    def node_dir(self, node_id: str) -> Path:
        """Return a node's directory. The embedded head's is kept: the next head finds fork servers and locks there."""
        return node_directory(self.namespace, LOCAL if self.embedded else node_id)

    @property
    def head_file(self) -> Path:
        """Path of the record of the embedded head's processes."""
        return self.paths.ray / "head.json"

    @property
    def last_seen_file(self) -> Path | None:
        """Path of the record of an existing cluster's nodes as they were last seen; an embedded head's only node needs none."""
        return None if self.embedded else self.paths.ray / "nodes.json"

    @property
    def home_token(self) -> Path:
        """Path of the home's token, in the directory of jobs: only that directory must be shared with other nodes."""
        return self.paths.jobs / ".home-token"

    @property
    def fork_socket(self) -> Path:
        """Socket of the fork server that is started beside a new head."""
        return fork_socket(self.node_dir(LOCAL), sys.executable)

    def ray_directory(self) -> Path:
        """Return the directory where Ray creates its sockets and logs."""
        wanted = self.paths.ray / "s"
        if len(os.fsencode(wanted)) <= LONGEST_RAY_DIRECTORY:
            return wanted
        return make_node_directory(self.namespace, "ray")

    def remove_node_state(self) -> None:
        """Remove sockets, locks and pages of a head that has ended: no process uses them."""
        remove_private(self.node_dir(LOCAL).parent)
        remove_private(page_directory(self.namespace))

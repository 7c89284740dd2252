"""Creates node agents, and finds the agents that an earlier daemon created."""

from __future__ import annotations

import contextlib
import re
import secrets
from typing import TYPE_CHECKING, Any

from orchestrator.durable_files import write_whole
from orchestrator.runtime.names import SERVICES, agent_name

if TYPE_CHECKING:
    from orchestrator.runtime.cluster.site import Site


class AgentMaker:
    """Creates the agents. ``simulate_gpus`` is a number per node; 0 uses the node's real GPUs."""

    def __init__(self, site: Site, simulate_gpus: int) -> None:
        self._site = site
        self._simulate_gpus = simulate_gpus
        self._home_token = ""

    @property
    def embedded(self) -> bool:
        """Whether the cluster is the embedded one: a single node, on this machine."""
        return self._site.embedded

    def keep_home_token(self) -> None:
        """Write the token by which a node proves that it shares the home; an existing one is kept: agents outlive daemons.

        An empty or torn one is replaced: an agent compares the file's content, which no agent had as its proof.
        """
        path = self._site.home_token
        try:
            self._home_token = path.read_text(errors="replace")
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not re.fullmatch(r"[0-9a-f]{32}", self._home_token):
            self._home_token = secrets.token_hex(16)
            write_whole(path, self._home_token.encode())

    def make(self, node_id: str) -> Any:
        """Find or create the agent of a node. Blocks."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from orchestrator.runtime.nodes.agent import NodeAgent

        return (
            ray.remote(NodeAgent)
            .options(
                name=agent_name(node_id),
                namespace=self._site.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=64,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            .remote(
                node_id=node_id,
                node_dir=str(self._site.node_dir(node_id)),
                simulate_gpus=self._simulate_gpus,
                home_token=(str(self._site.home_token), self._home_token),
            )
        )


def remove_services(space: str) -> None:
    """End the daemon's own agents and exporters, which are the named actors of its namespace. Blocks."""
    import ray
    from ray.util import list_named_actors

    for name in list_named_actors():
        if name.startswith(SERVICES):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=space), no_restart=True)

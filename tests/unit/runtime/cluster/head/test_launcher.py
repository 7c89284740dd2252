"""The launcher changes one argument of the raylet's command line."""

from __future__ import annotations

import shlex

from orchestrator.runtime.cluster.head import worker_template
from orchestrator.runtime.cluster.head.launcher import with_the_template


def test_the_raylet_is_given_the_template_as_its_dashboard_agent() -> None:
    command = [
        "raylet",
        "--node_id=1",
        "--dashboard_agent_command=/python agent.py --x=1",
        "--runtime_env_agent_command=b",
    ]
    start, node, agent, others = with_the_template(command, "/s/workers")
    assert (start, node, others) == ("raylet", "--node_id=1", "--runtime_env_agent_command=b")
    name, _, program = agent.partition("=")
    assert name == "--dashboard_agent_command"
    assert shlex.split(program)[1:] == [worker_template.__file__, "/s/workers"]

"""The launcher changes two arguments of the raylet's command line."""

from __future__ import annotations

from orchestrator.runtime.cluster.head.launcher import with_own_agents


def test_the_raylet_is_given_other_programs_as_its_agents() -> None:
    command = [
        "raylet",
        "--node_id=1",
        "--dashboard_agent_command=/python agent.py --x=1",
        '--runtime_env_agent_command=/python "a b.py" --y=2',
        "--head",
    ]
    assert with_own_agents(
        command, ["/python", "template.py", "/s/workers"], ["/python", "late.py", "127.0.0.1", "/s/p q"]
    ) == [
        "raylet",
        "--node_id=1",
        "--dashboard_agent_command=/python template.py /s/workers",
        '--runtime_env_agent_command=/python late.py 127.0.0.1 "/s/p q" /python "a b.py" --y=2',
        "--head",
    ]

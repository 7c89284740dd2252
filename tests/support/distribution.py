"""Distributes a suite's files over the processes of pytest-xdist: the longest first, daemons reused.

A file's tests stay together. The daemons of ``stack`` and ``breakable`` live as long as their process, so a process
continues with files that use its daemon, and starts another only when no other file is left.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xdist.scheduler import LoadScopeScheduling

from tests.support.trees import tree_of

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

ROOT: Final = Path(__file__).parents[2]
DAEMONS: Final = ("breakable", "stack")
SECONDS: Final = {
    "test_hosts.py": 180,
    "test_contract_on_ray.py": 110,
    "test_drills.py": 90,
    "test_killed_together.py": 90,
    "test_prometheus_stack.py": 70,
    "test_two_hosts.py": 70,
    "test_ray_cluster.py": 60,
    "test_trainer_huggingface.py": 60,
    "test_wheel.py": 60,
    "test_daemon_kills.py": 50,
    "test_browser.py": 45,
    "test_benchmark.py": 40,
    "test_docs.py": 40,
    "test_power_cuts.py": 40,
    "test_ray_and_power.py": 40,
    "test_torchrun_parity.py": 40,
    "test_trainer_examples.py": 40,
    "test_actors_and_services.py": 30,
    "test_daemon_killed.py": 30,
    "test_findings_and_rules.py": 30,
    "test_forkserver_process.py": 30,
    "test_systemd.py": 30,
    "test_as_a_user.py": 20,
    "test_checkpoint_identity.py": 20,
    "test_daemon_start.py": 20,
    "test_deploy.py": 20,
    "test_elastic.py": 20,
    "test_forkserver_by_hand.py": 20,
    "test_forkserver_kills.py": 20,
    "test_hangs.py": 20,
    "test_main_job.py": 20,
    "test_rank_remains.py": 20,
    "test_recipes.py": 20,
    "test_simulated_gpus.py": 20,
    "test_trainer_job.py": 20,
    "test_training_process.py": 20,
    "test_with_prometheus.py": 20,
    "test_campaign.py": 15,
    "test_group.py": 15,
    "test_light_client.py": 15,
    "test_rules_promtool.py": 15,
    "test_script_advice.py": 15,
    "test_stops_from_outside.py": 15,
    "test_trackers.py": 15,
    "test_trainer_balance.py": 15,
    "test_trainer_numerics.py": 15,
    "test_advising.py": 10,
    "test_http_interface.py": 10,
    "test_recovery.py": 10,
    "test_report.py": 10,
    "test_trainer_processes.py": 10,
}
"""Approximate seconds of the long files, on two idle cores; the others take less than ten. A wrong number only costs balance."""


@functools.cache
def shared_daemon(file: str) -> str:
    """Return the name of the shared daemon that the tests and fixtures of a file use; empty for none."""
    functions = [node for node in ast.walk(tree_of((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)]
    asking = [one for one in functions if one.name.startswith("test_") or "fixture" in map(_name, one.decorator_list)]
    asked = {argument.arg for one in asking for argument in one.args.args}
    made = {one.name for one in asking if not one.name.startswith("test_")}
    return next((name for name in DAEMONS if name in asked - made), "")


def _name(decorator: ast.expr) -> str:
    """Return the attribute's name: ``fixture``, for ``@pytest.fixture`` and ``@pytest.fixture(...)``."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else ""


def next_file(waiting: Collection[str], own: Collection[str], taken: Collection[str]) -> str:
    """Return the file that a process takes next: it has the daemons ``own``; ``taken`` are those of all processes."""

    def place(file: str) -> tuple[int, int]:
        daemon = shared_daemon(file)
        if daemon and daemon in own:
            preference = 0
        elif daemon and daemon not in taken:
            preference = 1
        else:
            preference = 3 if daemon else 2
        return preference, -SECONDS.get(Path(file).name, 0)

    return min(waiting, key=place)


class LongestFirst(LoadScopeScheduling):
    """Scheduler that replaces the one of ``--dist loadfile``."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        daemons = {one: set(filter(None, map(shared_daemon, files))) for one, files in self.assigned_work.items()}
        file = next_file(self.workqueue, daemons[node], set().union(*daemons.values()))
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

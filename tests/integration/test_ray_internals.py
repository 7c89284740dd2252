"""The private parts of Ray that orch uses, one per test: when a new Ray changes one, a test names it.

Where they are used and what stands in for them: docs/decisions/runtime.md.
"""

from __future__ import annotations

import inspect
import mmap
import sys
from pathlib import Path

import psutil
from orchestrator.runtime.cluster.head.launcher import DASHBOARD_AGENT, RUNTIME_ENV_AGENT

from orchestrator.runtime.cluster.head import late_agent, worker_setup
from tests.support.processes import command_line, listening_on, ray_workers, worker_template
from tests.support.stack import Stack, wait_until


def test_a_head_can_be_started_without_its_server_process() -> None:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    assert "start_api_server" in vars(Node)
    wanted = {"no_monitor", "include_log_monitor", "object_store_memory", "node_ip_address", "_system_config"}
    assert wanted <= set(inspect.signature(RayParams.__init__).parameters)
    assert {"head", "shutdown_at_exit", "spawn_reaper"} <= set(inspect.signature(Node.__init__).parameters)


def test_workers_are_executed_without_a_program_of_rays_between(stack: Stack) -> None:
    """The raylet has orch's program in its command line, with arguments that the program can parse."""
    from ray._private import ray_constants
    from ray._private.parameter import RayParams
    from ray._private.runtime_env.context import RuntimeEnvContext

    assert "setup_worker_path" in inspect.signature(RayParams.__init__).parameters
    assert ray_constants.SETUP_WORKER_FILENAME == worker_setup.RAYS_OWN
    assert worker_setup.__file__ in " ".join(psutil.Process(stack.head_pids()["raylet"]).cmdline())
    plain = ["--language=PYTHON", f"--serialized-runtime-env-context={RuntimeEnvContext().serialize()}", "/w.py"]
    assert worker_setup.command(plain, sys.executable) == [sys.executable, "/w.py"]


def test_the_raylet_starts_no_dashboard_agent_of_rays(stack: Stack) -> None:
    """The raylet accepts another program for the agent, and the files from which it reads the agent's ports."""
    from ray import _raylet
    from ray._private import services

    assert {"persist_port", "METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME"} <= set(dir(_raylet))
    assert "DASHBOARD_AGENT_LISTEN_PORT_NAME" in dir(_raylet)
    source = inspect.getsource(services.start_raylet)
    assert DASHBOARD_AGENT in source
    assert RUNTIME_ENV_AGENT in source
    assert "start_ray_process(" in source
    children = psutil.Process(stack.head_pids()["raylet"]).children()
    assert not [child for child in children if "DashboardAgent" in " ".join(command_line(child))]
    template = worker_template(stack).pid
    agents = wait_until("there is a node agent", lambda: ray_workers(stack, "NodeAgent"))
    assert {agent.ppid() for agent in agents} == {template}, "a fork"


def test_rays_agent_of_runtime_envs_begins_with_the_first_job_that_has_one(stack: Stack, tmp_path: Path) -> None:
    def agent() -> tuple[int, str]:
        for child in psutil.Process(stack.head_pids()["raylet"]).children():
            line = " ".join(command_line(child))
            if late_agent.__file__ in line or "RuntimeEnvAgent" in line:
                return child.pid, line.strip()
        return 0, ""

    before, _ = agent()
    assert before
    (tmp_path / "work" / "shelf").mkdir(parents=True)
    (tmp_path / "work" / "shelf" / "__init__.py").write_text("BOOKS = 7\n")
    spec = (
        "{version: 1, name: env, entrypoint: python -c 'import shelf; print(shelf.BOOKS)', runtime_env: {py_modules: [shelf]}, "
        "resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 1}}}"
    )
    job = stack.wait(stack.submit(spec, tmp_path / "work"))
    assert job.state == "SUCCEEDED", job.failure
    assert agent() == (before, "ray::RuntimeEnvAgent")


def test_the_embedded_head_is_small_and_listens_on_the_loopback_address_alone(stack: Stack) -> None:
    pids = stack.head_pids()
    assert set(pids) == {"gcs_server", "raylet"}
    addresses = listening_on(list(pids.values()))
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_idle_workers_can_be_asked_for(stack: Stack) -> None:
    from ray.core.generated import node_manager_pb2

    fields = set(node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR.fields_by_name)
    assert {"language", "num_workers", "keep_alive_duration_secs"} <= fields
    assert wait_until("an idle worker waits", lambda: ray_workers(stack, "ray::IDLE"))


def test_the_loopback_switch_still_exists() -> None:
    from ray._private import ray_constants, services

    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services.get_node_ip_address)


def test_actors_import_nothing_to_copy_objects_that_nobody_sends(stack: Stack) -> None:
    """A node agent that answers calls and the daemon that makes them do not load pyarrow for that."""
    from orchestrator.runtime.cluster.serializers import skip_foreign_serializers
    from ray.util import serialization_addons

    assert callable(serialization_addons.apply)
    before = serialization_addons.apply
    try:
        assert skip_foreign_serializers()
    finally:
        serialization_addons.apply = before
    wait_until("there is a node", stack.client.nodes)
    agents = wait_until("there is a node agent", lambda: ray_workers(stack, "NodeAgent"))
    for process in (*agents, psutil.Process(stack.daemon_pid())):
        assert not [m.path for m in process.memory_maps() if "pyarrow" in m.path]


def test_the_control_plane_is_asked_in_its_own_messages() -> None:
    from ray._private import grpc_utils, worker
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    assert "address" in inspect.signature(grpc_utils.init_grpc_channel).parameters
    assert hasattr(worker.global_worker, "connected")
    for service in ("NodeInfo", "NodeResourceInfo", "PlacementGroupInfo"):
        assert hasattr(gcs_service_pb2_grpc, f"{service}GcsServiceStub")
    for message in ("GetAllNodeInfo", "GetAllAvailableResources", "GetAllPlacementGroup", "GetNamedPlacementGroup"):
        assert hasattr(gcs_service_pb2, f"{message}Request")


def test_a_driver_can_be_told_to_outlive_its_head() -> None:
    """Also tried by hand: if the head dies during a call, a driver ends 60 s later; with this setting it lives on."""
    import ray._raylet
    from orchestrator.runtime.cluster.driver_environment import RECONNECT_SECONDS

    with Path(ray._raylet.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert library.find(RECONNECT_SECONDS.removeprefix("RAY_").encode()) > 0


def test_the_setting_is_the_daemons_own(stack: Stack) -> None:
    from orchestrator.runtime.cluster.driver_environment import OF_THE_DRIVER

    for pid in stack.head_pids().values():
        assert not set(OF_THE_DRIVER) & psutil.Process(pid).environ().keys()

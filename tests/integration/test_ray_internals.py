"""The private parts of Ray that orch uses, and what its documented ones do for orch: when a new Ray changes one, a test names it.

Where they are used and what stands in for them: docs/decisions/runtime.md.
"""

from __future__ import annotations

import inspect
import mmap
from pathlib import Path

import psutil

from orchestrator.runtime.cluster.head import OF_THE_DRIVER, RECONNECT_SECONDS, of_session
from tests.support.processes import listening_on, ray_workers
from tests.support.stack import Stack, wait_until


def test_of_what_ray_starts_only_what_orch_uses_runs(stack: Stack) -> None:
    pids = stack.head_pids()
    assert set(pids) == {"gcs_server", "raylet"}
    session = {p.pid: p for p in of_session(pids["raylet"])}
    of_raylet = {child.pid for child in psutil.Process(pids["raylet"]).children(recursive=True)}
    assert session.keys() - of_raylet == set(pids.values())
    addresses = listening_on(list(pids.values()))
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_a_job_with_a_runtime_env_runs(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "work" / "shelf").mkdir(parents=True)
    (tmp_path / "work" / "shelf" / "__init__.py").write_text("BOOKS = 7\n")
    spec = (
        "{version: 1, name: env, entrypoint: python -c 'import shelf; print(shelf.BOOKS)', runtime_env: {py_modules: [shelf]}, "
        "resources: {num_workers: 1, resources_per_worker: {gpu: 0, cpu: 1}}}"
    )
    job = stack.wait(stack.submit(spec, tmp_path / "work"))
    assert job.state == "SUCCEEDED", job.failure


def test_idle_workers_can_be_asked_for(stack: Stack) -> None:
    from ray.core.generated import node_manager_pb2

    fields = set(node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR.fields_by_name)
    assert {"language", "num_workers", "keep_alive_duration_secs"} <= fields
    assert wait_until("an idle worker waits", lambda: ray_workers(stack, "ray::IDLE"))


def test_the_loopback_switch_still_exists() -> None:
    from ray._private import ray_constants, services

    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services.get_node_ip_address)


def test_the_control_plane_is_asked_in_its_own_messages() -> None:
    from ray._private import grpc_utils
    from ray.core.generated import gcs_service_pb2

    assert "address" in inspect.signature(grpc_utils.init_grpc_channel).parameters
    services = gcs_service_pb2.DESCRIPTOR.services_by_name
    for service, method in (
        ("NodeInfo", "GetAllNodeInfo"),
        ("NodeInfo", "CheckAlive"),
        ("NodeResourceInfo", "GetAllAvailableResources"),
        ("PlacementGroupInfo", "GetAllPlacementGroup"),
        ("PlacementGroupInfo", "GetNamedPlacementGroup"),
    ):
        found = services[f"{service}GcsService"].methods_by_name[method]
        assert (found.input_type.name, found.output_type.name) == (f"{method}Request", f"{method}Reply")


def test_a_driver_can_be_told_to_outlive_its_head() -> None:
    """Also tried by hand: if the head dies during a call, a driver ends 60 s later; with this setting it lives on."""
    import ray._raylet

    with Path(ray._raylet.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert library.find(RECONNECT_SECONDS.removeprefix("RAY_").encode()) > 0


def test_the_setting_is_the_daemons_own(stack: Stack) -> None:
    for pid in stack.head_pids().values():
        assert not set(OF_THE_DRIVER) & psutil.Process(pid).environ().keys()

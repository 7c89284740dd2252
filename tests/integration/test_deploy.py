"""Deployment files against the tools that will read them, and against each other."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import grp
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

import jsonschema
import psutil
import pytest
import yaml

from dashboards import rules
from orchestrator.cli.app import ENTRIES
from orchestrator.runtime.cluster.head import SETTINGS
from orchestrator.spec.settings import Settings
from orchestrator.store.store import Store
from orchestrator.telemetry import grafana
from orchestrator.telemetry import local_prometheus as lp
from tests.integration import npm
from tests.integration.test_boards import PACKAGES as GRAFANA_PACKAGES
from tests.support.kuberay import RAY_CLUSTER
from tests.support.ports import free_port
from tests.support.processes import kill_each, listening_on, tree
from tests.support.stack import PATIENCE_SECONDS, wait_until
from tests.unit.core.builders import ID, submission

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BESIDE_PYTHON = Path(sys.executable).parent


def tool(name: str) -> str:
    """Return the path of a program beside this Python or on the PATH; skip the test without it."""
    found = shutil.which(name, path=f"{BESIDE_PYTHON}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is missing")
    return found


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS, **options)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# -- the image


def test_hadolint_has_nothing_to_say() -> None:
    done = run(tool("hadolint"), "--no-color", str(ROOT / "Dockerfile"))
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [
        (line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)
    ]


def test_what_the_image_copies_is_there_and_in_the_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source.rstrip("/") in allowed, f"{source} is not in the build context"


def test_the_image_runs_as_nobody_special_under_an_init() -> None:
    found = instructions()
    stages = [rest for name, rest in found if name == "FROM"]
    last = found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]
    assert stages == ["${BASE} AS build", "scratch AS sbom", "${BASE} AS run"]
    assert [rest for name, rest in last if name == "USER"] == ["10001:10001"]
    assert any(name == "HEALTHCHECK" for name, _ in last)
    entry = json.loads(next(rest for name, rest in last if name == "ENTRYPOINT"))
    assert entry[0] == "/usr/bin/tini"
    assert {"BASE", "VARIANT", "TORCH_INDEX_URL"} <= {rest.split("=")[0] for name, rest in found if name == "ARG"}


def test_the_image_has_packages_by_hash_and_torch_alone_by_version() -> None:
    """What resolves, or is not held to a hash, is torch; the wheel of this repository brings nothing with it."""
    (hashed,) = [rest for name, rest in instructions() if name == "ENV" and "HASHED=" in rest]
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes"} <= set(hashed.strip('"').split())
    steps = [step.strip() for name, rest in instructions() if name == "RUN" for step in rest.split("&&")]
    lines = [step for step in steps if re.search(r"/pip (install|wheel|download|\$)", step)]
    assert [line.split()[1:] for line in lines if "HASHED" in line] == [
        ["${HASHED}", "deploy/build-requirements.txt"],
        ["${HASHED}", "deploy/requirements.txt"],
    ]
    others = [line for line in lines if "HASHED" not in line]
    assert [("--no-deps" in line, '"${wanted}"' in line) for line in others] == [
        (False, True),
        (True, False),
        (True, False),
    ]


BASES = ["python:3.11-slim-bookworm", "prom/prometheus:v3.5.0", "prom/alertmanager:v0.28.1", "grafana/grafana:13.2.3"]


@pytest.fixture
def pinning(tmp_path: Path) -> Path:
    """Return a copy of what deploy/pin-images works on, with images that have no digests, and a docker that knows one."""
    (tmp_path / "deploy").mkdir()
    for name in ("Dockerfile", "deploy/compose.yaml", "deploy/pin-images"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("Dockerfile", "deploy/compose.yaml"):
        path = tmp_path / name
        path.write_text(re.sub(r"@sha256:[0-9a-f]{64}$", "", path.read_text(), flags=re.MULTILINE))
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\necho "$@" >> "$0.log"\necho "$DIGEST"\n')
    docker.chmod(0o755)
    return tmp_path


def pin(folder: Path, *arguments: str, digest: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "DIGEST": digest}
    return run(str(folder / "deploy" / "pin-images"), *arguments, env=environ)


def test_images_of_others_are_pinned_by_the_digests_of_their_registries(pinning: Path) -> None:
    before = pin(pinning, "--check", digest="")
    assert before.returncode == 1
    assert [image for image in BASES if image in before.stderr] == BASES
    for digest in (f"sha256:{'0a' * 32}", f"sha256:{'1b' * 32}"):  # and again, when the tags have moved
        done = pin(pinning, digest=digest)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == [f"{image}@{digest}" for image in BASES]
        assert f"ARG BASE={BASES[0]}@{digest}\n" in (pinning / "Dockerfile").read_text()
        services = load(pinning / "deploy/compose.yaml")["services"]
        pinned = [services[name]["image"] for name in ("prometheus", "alertmanager", "grafana")]
        assert pinned == [f"{image}@{digest}" for image in BASES[1:]]
    assert "@" not in (pinning / "bin" / "docker.log").read_text(), "the digest that the tag has now is asked for"
    done = pin(pinning, "--check", digest="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def built_with(folder: Path, variant: str, *wheels: str, index: str = "") -> tuple[int, list[str]]:
    """Run the instruction that installs torch, with a pip that writes down its arguments; return its code and those."""
    (step,) = [rest for name, rest in instructions() if name == "RUN" and "pinned=" in rest]
    (folder / "wheels").mkdir(exist_ok=True)
    for wheel in wheels:
        (folder / "wheels" / wheel).touch()
    (folder / "bin").mkdir(exist_ok=True)
    pip = folder / "bin" / "pip"
    pip.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/asked\n")
    pip.chmod(0o755)
    shutil.copy(ROOT / "constraints.txt", folder)
    step = step.replace("/opt/orch/bin", str(folder / "bin")).replace("/wheels", str(folder / "wheels"))
    done = run(
        "bash",
        "-o",
        "pipefail",
        "-c",
        step,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "VARIANT": variant, "TORCH_INDEX_URL": index},
    )
    asked = folder / "asked"
    return done.returncode, asked.read_text().split() if asked.exists() else done.stderr.split()


def test_each_variant_asks_for_its_own_build_of_the_torch_that_is_pinned(tmp_path: Path) -> None:
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    code, asked = built_with(tmp_path, "cuda")
    assert (code, asked[-1]) == (0, f"torch=={pinned},!={pinned}+cpu")
    code, asked = built_with(tmp_path, "cpu", index="http://127.0.0.1/cpu")
    assert (code, asked[-3:]) == (0, ["--extra-index-url", "http://127.0.0.1/cpu", f"torch=={pinned}+cpu"])
    code, asked = built_with(tmp_path, "cpu", f"torch-{pinned}+cpu-cp311-cp311-linux_x86_64.whl")
    assert (code, asked[-1]) == (0, f"torch=={pinned}+cpu")


@pytest.mark.parametrize(("variant", "word"), [("cpu", "TORCH_INDEX_URL,"), ("gpu", "VARIANT=gpu")])
def test_a_variant_that_cannot_be_built_is_refused_before_anything_is_downloaded(
    tmp_path: Path, variant: str, word: str
) -> None:
    code, told = built_with(tmp_path, variant)
    assert code == 1
    assert word in told


def test_the_release_workflow_is_one() -> None:
    done = run(
        tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.github-workflows",
        str(ROOT / ".github/workflows/release.yml"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = load(ROOT / ".github/workflows/release.yml")["jobs"]
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["test"]["strategy"]["matrix"]["python"] == declared
    assert "deploy/pin-images --check" in [step.get("run") for step in jobs["build"]["steps"]]
    (publish,) = [step for step in jobs["publish"]["steps"] if "pypi-publish" in step.get("uses", "")]
    assert "with" not in publish, "trusted publishing needs no token"
    assert jobs["publish"]["permissions"]["id-token"] == "write"


def test_shell_scripts_parse() -> None:
    assert run("sh", "-n", str(DEPLOY / "entrypoint.sh")).returncode == 0
    for name in ("build-without-engine.sh", "pin-images"):
        assert run("bash", "-n", str(DEPLOY / name)).returncode == 0
    for name in ("python", "environment"):
        assert run("sh", "-n", str(ROOT / ".ci" / name)).returncode == 0


FAKE_ORCH = """\
#!/bin/sh
echo "$@" >> "$LOG"
if [ "$1" = down ]; then
  [ "$DOWN" = works ] || exit 4
  kill -USR1 "$(cat "$LOG.pid")"
  exit 0
fi
echo $$ > "$LOG.pid"
trap 'exit 0' USR1
trap 'echo terminated >> "$LOG"; exit 7' TERM
echo ready >> "$LOG"
i=0
while [ $i -lt 600 ]; do sleep 0.05; i=$((i + 1)); done
"""


class Container:
    """A run of the entry point with a fake `orch` first on the PATH."""

    def __init__(self, folder: Path, *arguments: str, down: str = "works") -> None:
        self.log = folder / "log"
        fake = folder / "orch"
        fake.write_text(FAKE_ORCH)
        fake.chmod(0o755)
        environment = {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(self.log), "DOWN": down}
        self.process = subprocess.Popen([str(DEPLOY / "entrypoint.sh"), *arguments], env=environment)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 300
        while not (self.log.exists() and "ready" in self.log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_a_container_with_its_own_ray_lets_jobs_save_first(tmp_path: Path) -> None:
    with Container(tmp_path, "orch", "serve") as container:
        container.wait_until_ready()
        assert container.stop() == 0
        assert container.log.read_text().splitlines() == ["serve", "ready", "down --stop-jobs"]


def test_a_container_whose_daemon_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    with Container(tmp_path, "orch", "serve", down="fails") as container:
        container.wait_until_ready()
        assert container.stop() == 7
        assert container.log.read_text().splitlines() == ["serve", "ready", "down --stop-jobs", "terminated"]


INTERRUPT = """\
commands=0
before_each_command() {
  commands=$((commands + 1))
  [ "$commands" -eq "$INTERRUPT_BEFORE" ] || return 0
  echo "$BASH_COMMAND" > "$LOG.interrupted"
  kill -TERM $$
}
trap before_each_command DEBUG
"""
"""bash reads this before the script, and from then on calls the function before each of the script's commands."""


def interrupted(folder: Path, before: int, down: str) -> str | None:
    """Return the command before which the entry point gets SIGTERM; None if it has fewer. Its daemon must end."""
    folder.mkdir()
    hook = folder / "hook"
    hook.write_text(INTERRUPT)
    fake = folder / "orch"
    fake.write_text(FAKE_ORCH)
    fake.chmod(0o755)
    log = folder / "log"
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "LOG": str(log),
        "DOWN": down,
        "BASH_ENV": str(hook),
        "INTERRUPT_BEFORE": str(before),
    }
    script = [shutil.which("bash") or "bash", str(DEPLOY / "entrypoint.sh"), "orch", "serve"]
    with subprocess.Popen(script, env=environment, start_new_session=True) as process:
        try:
            told = Path(f"{log}.interrupted")
            deadline = time.monotonic() + 300
            asleep = 0
            while process.poll() is None and not told.exists() and time.monotonic() < deadline:
                # Without a signal, the script's last command is `wait`: the shell sleeps. Before that it may only be slow.
                ready = log.exists() and "ready" in log.read_text()
                asleep = asleep + 1 if ready and psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING else 0
                if asleep == 25:
                    break
                time.sleep(0.02)
            if process.poll() is None and not told.exists():
                return None
            process.wait(timeout=PATIENCE_SECONDS)
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)  # the daemon is gone as well
            return told.read_text().strip()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("down", ["works", "fails"])
def test_a_signal_before_any_command_of_the_entry_point_ends_the_container(tmp_path: Path, down: str) -> None:
    commands: list[str] = []
    while (command := interrupted(tmp_path / str(len(commands)), len(commands) + 1, down)) is not None:
        commands.append(command)
    assert {"daemon=$!", "trap stop TERM INT"} <= set(commands), "the window between the start and the trap was hit"


@pytest.mark.parametrize("flag", [["--ray-address", "127.0.0.1:6379"], ["--ray-address=auto"]])
def test_a_container_of_a_ray_elsewhere_leaves_jobs_alone(tmp_path: Path, flag: list[str]) -> None:
    with Container(tmp_path, "orch", "serve", *flag) as container:
        container.wait_until_ready()
        assert container.stop() == 7
        assert "down" not in container.log.read_text()


def test_other_programs_run_as_they_are_and_codes_come_through(tmp_path: Path) -> None:
    with Container(tmp_path, "sh", "-c", "exit 3") as container:
        assert container.process.wait(timeout=PATIENCE_SECONDS) == 3
    (tmp_path / "broken").mkdir()
    with Container(tmp_path / "broken", "orch", "serve") as container:
        container.wait_until_ready()
        os.kill(int((tmp_path / "broken/log.pid").read_text()), signal.SIGTERM)
        assert container.process.wait(timeout=PATIENCE_SECONDS) == 7, (
            "a daemon that ends by itself ends the container with its code"
        )


# -- compose


def interpolated(value: Any) -> Any:
    """Replace Compose's ${NAME:-default} by the defaults."""
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[1] or "", value)
    return value


COMPOSE = interpolated(load(DEPLOY / "compose.yaml"))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cpu.yaml"])
def test_compose_files_fit_the_published_schema(name: str, tmp_path: Path) -> None:
    copied = tmp_path / name
    copied.write_text(
        (DEPLOY / name).read_text().replace("!reset null", "{}")
    )  # compose's own tag, not yet in the schema
    done = run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(copied))
    assert done.returncode == 0, done.stdout


def test_nothing_is_exposed_beyond_this_machine() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name, service in COMPOSE["services"].items():
        assert service.get("network_mode", "own") == ("own" if name == "net" else "service:net")
        assert not service.get("privileged")
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_ray_is_a_service_of_its_own_that_no_restart_of_the_daemon_touches() -> None:
    services = COMPOSE["services"]
    assert services["orch"]["command"][:3] == ["orch", "serve", "--ray-address"]
    assert services["orch"]["pid"] == services["orch"]["ipc"] == "service:ray"
    assert set(services["orch"]["volumes"]) == set(services["ray"]["volumes"])
    assert "orch" not in services["ray"].get("depends_on", {})


def test_versions_are_pinned_and_grafanas_is_the_one_that_boards_are_checked_against() -> None:
    images = {name: service["image"] for name, service in COMPOSE["services"].items()}
    for name in ("prometheus", "alertmanager", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$", images[name]), images[name]
    version = images["grafana"].split("@")[0].split(":")[1]
    assert GRAFANA_PACKAGES[0] == f"@grafana/schema@{version}"


def test_every_mount_and_volume_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).resolve().exists(), source
            elif not source.startswith("/"):
                assert source in COMPOSE["volumes"]


def test_every_variable_of_compose_is_explained_or_has_a_default() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    explained = set(re.findall(r"^(\w+)=", (DEPLOY / "env.example").read_text(), re.MULTILINE))
    for name, rest in re.findall(r"(?<!\$)\$\{(\w+)([^}]*)\}", text):
        assert rest.startswith(":-") or name in explained, name


# -- Prometheus, Alertmanager, Grafana


def test_prometheus_configuration_is_the_one_of_the_local_stack() -> None:
    assert load(DEPLOY / "prometheus/prometheus.yml") == lp.prometheus_config(
        daemon="127.0.0.1:9476", alertmanager="127.0.0.1:9093"
    )


def test_alertmanager_configuration_is_the_one_of_the_local_stack() -> None:
    found, made = (
        load(DEPLOY / "alertmanager/alertmanager.yml"),
        lp.alertmanager_config(receivers=[], receiver="none"),
    )
    assert found["route"] == made["route"]
    assert found["inhibit_rules"] == made["inhibit_rules"]


@pytest.mark.parametrize("receiver", ["none", "webhook", "email", "slack"])
def test_alertmanager_takes_every_receiver(receiver: str, tmp_path: Path) -> None:
    amtool = tool("amtool")
    config = tmp_path / "alertmanager.yml"
    text = (DEPLOY / "alertmanager/alertmanager.yml").read_text()
    assert text.count("receiver: none") == 1
    config.write_text(text.replace("receiver: none", f"receiver: {receiver}"))
    done = run(amtool, "check-config", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    for severity in ("warning", "critical"):
        routed = run(
            amtool, "config", "routes", "test", f"--config.file={config}", f"severity={severity}", "component=job"
        )
        assert routed.stdout.strip() == receiver


def test_grafana_is_provisioned_with_the_generated_boards() -> None:
    provider = load(DEPLOY / "grafana/provisioning/dashboards/orch.yaml")["providers"][0]
    mounted = COMPOSE["services"]["grafana"]["volumes"]
    assert f"../orchestrator/data/dashboards:{provider['options']['path']}:ro" in mounted
    source = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    scrapes = load(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]
    assert source["jsonData"]["timeInterval"] == min(s.get("scrape_interval", "15s") for s in scrapes[1:])


# -- Kubernetes

KUBERNETES = "1.37"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the objects that kustomize makes of the base, with the boards beside it as its page says."""
    base = tmp_path_factory.mktemp("kubernetes") / "base"
    shutil.copytree(DEPLOY / "kubernetes", base, ignore=shutil.ignore_patterns("generated"))
    grafana.export(base / "generated")
    done = run(tool("kubectl"), "kustomize", str(base))
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind]
    return found


def test_objects_of_kubernetes_fit_its_schemas(objects: list[dict[str, Any]]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    own = [o for o in objects if "." not in o["apiVersion"].split("/")[0] or "k8s.io" in o["apiVersion"]]
    assert {o["kind"] for o in own} == {
        "ServiceAccount",
        "PersistentVolumeClaim",
        "Service",
        "NetworkPolicy",
        "ConfigMap",
    }
    for found in own:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spec = of_kind(objects, "RayCluster")["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_pods_of_the_ray_cluster_fit_kubernetes_schemas(objects: list[dict[str, Any]]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for template in pods(objects):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        broken = copy.deepcopy(pod)
        broken["spec"]["containers"][0]["imagePull"] = "Always"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_the_ray_cluster_fits_kuberays_types(objects: list[dict[str, Any]]) -> None:
    cluster = of_kind(objects, "RayCluster")
    jsonschema.validate(cluster, RAY_CLUSTER)
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    constraint = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert constraint
    assert cluster["spec"]["rayVersion"] == constraint[1]


def test_ray_s_containers_have_probes_that_the_image_can_pass(objects: list[dict[str, Any]]) -> None:
    """KubeRay gives a container without probes its own, which need wget and Ray's dashboard."""
    for template, group in zip(pods(objects), ("headGroupSpec", "workerGroupSpecs"), strict=True):
        found = of_kind(objects, "RayCluster")["spec"][group]
        parameters = (found if isinstance(found, dict) else found[0])["rayStartParams"]
        listening = {int(parameters["node-manager-port"])} | ({6379} if group == "headGroupSpec" else set())
        container = template["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert ports[container[kind]["tcpSocket"]["port"]] in listening, (group, kind)


def test_pods_have_the_least_rights(objects: list[dict[str, Any]]) -> None:
    for template in pods(objects):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"]
    assert not [o for o in objects if o["kind"].endswith(("Role", "RoleBinding"))]


def test_the_same_token_guards_what_is_read(objects: list[dict[str, Any]]) -> None:
    (daemon,) = [c for c in pods(objects)[0]["spec"]["containers"] if c["name"] == "orch"]
    listen = daemon["args"][daemon["args"].index("--read-listen") + 1]
    assert listen.startswith("0.0.0.0:"), "Prometheus is in another pod"
    assert daemon["args"][daemon["args"].index("--token-file") + 1].endswith("/read")
    monitor, scrape = of_kind(objects, "ServiceMonitor"), of_kind(objects, "ScrapeConfig")
    for access in (
        monitor["spec"]["endpoints"][0]["authorization"],
        scrape["spec"]["authorization"],
        scrape["spec"]["httpSDConfigs"][0]["authorization"],
    ):
        assert access["credentials"] == {"name": "orch-tokens", "key": "read"}
    names = {r["targetLabel"]: r.get("replacement") for r in monitor["spec"]["endpoints"][0]["relabelings"]}
    assert names["job"] == rules.DAEMON_JOB
    assert {"targetLabel": "job", "replacement": rules.EXPORTER_JOB} in scrape["spec"]["relabelings"]


def test_boards_and_rules_arrive_unchanged(objects: list[dict[str, Any]]) -> None:
    boards = of_kind(objects, "ConfigMap")["data"]
    data = ROOT / "orchestrator/data"
    assert boards == {path.name: path.read_text() for path in data.glob("dashboards/*.json")}
    assert of_kind(objects, "PrometheusRule")["spec"] == yaml.safe_load((data / "orch.rules.yml").read_text())
    total = sum(len(text) for text in boards.values())
    assert total < 1_000_000, "a config map holds 1 MiB at most"


OPERATOR_PACKAGES = ("@kubernetes-models/prometheus-operator@6.0.0", "typescript@5.9.3")
VALIDATE = """\
import fs from 'fs';
const found = [];
for (const item of JSON.parse(fs.readFileSync(0, 'utf8'))) {
  const path = `@kubernetes-models/prometheus-operator/${item.apiVersion}/${item.kind}`;
  const Model = (await import(path))[item.kind];
  try { new Model(item).validate(); } catch (error) { found.push(`${item.kind}: ${error.message}`); }
}
console.log(found.join('\\n'));
"""


def operators_findings(items: list[dict[str, Any]], packages: Path, folder: Path) -> tuple[str, str]:
    """Return the errors that the operator's schemas find in the values, and its types in the keys."""
    folder.mkdir()
    for i, item in enumerate(items):
        kind, module = item["kind"], f"@kubernetes-models/prometheus-operator/{item['apiVersion']}/{item['kind']}"
        literal = json.dumps(item)
        (folder / f"item{i}.ts").write_text(
            f"import type {{ I{kind} }} from '{module}';\nexport const x: I{kind} = {literal};\n"
        )
    typed = npm.typescript(packages, folder)
    (folder / "validate.mjs").write_text(VALIDATE)
    done = subprocess.run(
        ["node", "validate.mjs"],
        cwd=folder,
        input=json.dumps(items),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return done.stdout.strip(), typed


@pytest.mark.rare
def test_objects_of_the_prometheus_operator_fit_its_schemas(
    objects: list[dict[str, Any]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packages = npm.installed(OPERATOR_PACKAGES, tmp_path_factory.mktemp("npm"))
    items = [of_kind(objects, kind) for kind in ("ServiceMonitor", "ScrapeConfig", "PrometheusRule")]
    assert operators_findings(items, packages, tmp_path / "right") == ("", "")
    wrong = copy.deepcopy(items)
    wrong[0]["spec"]["endpoints"][0]["intervall"] = "15s"
    wrong[1]["spec"]["httpSDConfigs"][0]["url"] = 7
    values, keys = operators_findings(wrong, packages, tmp_path / "wrong")
    assert "url must be string" in values
    assert "intervall" in keys


# -- memory: the settings of the embedded head, wherever else Ray is started


OOM_SETTINGS = {name: SETTINGS[name] for name in ("RAY_worker_oom_score_adjustment", "RAY_memory_monitor_refresh_ms")}


def test_compose_has_ray_spare_its_workers_when_memory_runs_out() -> None:
    environment = COMPOSE["services"]["ray"]["environment"]
    assert {name: environment.get(name) for name in OOM_SETTINGS} == OOM_SETTINGS


def test_kubernetes_has_ray_spare_its_workers_when_memory_runs_out(objects: list[dict[str, Any]]) -> None:
    for template in pods(objects):
        (ray,) = [c for c in template["spec"]["containers"] if c["name"].startswith("ray-")]
        environment = {entry["name"]: entry["value"] for entry in ray["env"]}
        assert {name: environment.get(name) for name in OOM_SETTINGS} == OOM_SETTINGS


def test_the_unit_has_ray_spare_its_workers_when_memory_runs_out() -> None:
    told = " ".join(unit("orch-ray.service")["Environment"]).split()
    assert {f"{name}={value}" for name, value in OOM_SETTINGS.items()} <= set(told)


# -- systemd


def unit(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / name).read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Return copies of the units, with /bin/true in place of an installation's programs."""
    made = []
    for path in (DEPLOY / "systemd").glob("*.service"):
        copied = tmp_path / path.name
        copied.write_text(re.sub(r"/opt/orch/bin/(orch|ray|python)", "/bin/true", path.read_text()))
        made.append(copied)
    return made


def test_systemd_finds_nothing_wrong(units: list[Path]) -> None:
    done = run(tool("systemd-analyze"), "verify", *map(str, units))
    # Known from systemd 254 on; earlier versions ignore it, as the unit says.
    told = [line for line in done.stderr.splitlines() if "Unknown key 'DelegateSubgroup'" not in line]
    assert (done.returncode, told) == (0, [])


def test_units_are_hardened(units: list[Path]) -> None:
    analyze = tool("systemd-analyze")
    for path in units:
        done = run(analyze, "security", "--offline=true", "--threshold=30", "--no-pager", str(path))
        assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_restarting_the_daemon_leaves_jobs_alone() -> None:
    daemon, ray = unit("orch.service"), unit("orch-ray.service")
    assert daemon["Wants"] == ["orch-ray.service"], "not BindsTo or PartOf: Ray's units live on their own"
    assert not {"Requires", "BindsTo", "PartOf"} & (set(daemon) | set(ray))
    assert "orch.service" not in " ".join(value for values in ray.values() for value in values)
    assert daemon["JoinsNamespaceOf"] == ["orch-ray.service"]
    assert daemon["PrivateTmp"] == ray["PrivateTmp"] == ["yes"]
    assert "--ray-address" in daemon["ExecStart"][0]


DRIVER = """
import sys, time, ray
ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: "ran").remote()), flush=True)
sys.stdin.readline()
"""


def environment_of(name: str, token: Path) -> dict[str, str]:
    settings = dict(word.split("=", 1) for line in unit(name)["Environment"] for word in line.split())
    settings["RAY_AUTH_TOKEN_PATH"] = str(token)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "ORCH_"))}
    return {**kept, **settings}


@pytest.mark.rare
def test_the_units_ray_listens_on_loopback_only_and_where_probes_ask(tmp_path: Path) -> None:
    token, port = tmp_path / "token", free_port()
    token.write_text("0" * 64)
    token.chmod(0o600)
    command = unit("orch-ray.service")["ExecStart"][0].split()[1:]
    command = [f"--port={port}" if word.startswith("--port=") else word for word in command]
    group = load(DEPLOY / "kubernetes/raycluster.yaml")["spec"]["headGroupSpec"]
    assert "node-manager-port" in group["rayStartParams"]
    raylet = free_port()  # the probes of Kubernetes need a port that is set by parameter
    temp = Path(tempfile.mkdtemp(prefix="orch-r-"))
    started = [str(BESIDE_PYTHON / "ray"), *command, f"--node-manager-port={raylet}", f"--temp-dir={temp}"]
    ray = subprocess.Popen(
        started, env=environment_of("orch-ray.service", token), stdout=subprocess.DEVNULL, start_new_session=True
    )
    driver = None
    try:
        for number in (port, raylet):  # as the probes do
            wait_until(f"port {number} accepts connections", lambda number=number: accepts(number), interval=0.1)
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, f"127.0.0.1:{port}"],
            env=environment_of("orch.service", token),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ran\n"
        addresses = listening_on([ray.pid, driver.pid])
        assert addresses
        assert all(ip_address(address.removeprefix("::ffff:")).is_loopback for address in addresses), addresses
    finally:
        victims = tree(*(p.pid for p in (ray, driver) if p is not None))
        kill_each(*victims)
        for process in (ray, driver):
            if process is not None:
                process.communicate()
        shutil.rmtree(temp, ignore_errors=True)


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=300):
        return True
    return False


def test_users_are_made_by_sysusers() -> None:
    done = run(tool("systemd-sysusers"), "--dry-run", str(DEPLOY / "systemd/orch.sysusers"))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-sysusers has no --dry-run")
    assert done.returncode == 0, done.stderr


def test_logrotate_understands_its_file(tmp_path: Path) -> None:
    logrotate = tool("logrotate")
    here = f"su {pwd.getpwuid(os.getuid()).pw_name} {grp.getgrgid(os.getgid()).gr_name}"
    text = (DEPLOY / "systemd/orch.logrotate").read_text().replace("su orch orch", here)
    config = tmp_path / "orch"
    for written, good in ((text, True), (text.replace("copytruncate", "copytruncat"), False)):
        config.write_text(written)
        config.chmod(0o644)
        done = run(logrotate, "--debug", "--state", str(tmp_path / "state"), str(config))
        assert ("error:" not in done.stderr) is good, done.stderr


# -- backup

BACKUP = str(DEPLOY / "backup.py")


def backup(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, BACKUP, *map(str, arguments), env={**os.environ, "ORCH_HOME": "/nonexistent"})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return an empty home; ``in_use`` gives it an open store with a job."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def in_use(home: Path) -> Store:
    paths = Settings.from_environ({"ORCH_HOME": str(home)}).paths
    store = Store.open(paths.store, reserve=paths.reserve, reserve_bytes=4096)
    asyncio.run(store.submit(submission()))
    return store


def test_a_record_in_use_is_backed_up_and_put_back(home: Path, tmp_path: Path) -> None:
    with contextlib.closing(in_use(home)):
        done = backup("write", tmp_path / "copies", "--home", home, "--keep", 2)
        assert done.returncode == 0, done.stderr
        copied = Path(done.stdout.strip())
        assert copied.parent == tmp_path / "copies"
        assert copied.stat().st_mode & 0o777 == 0o600
    assert backup("check", copied).returncode == 0
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    done = backup("restore", copied, "--home", fresh)
    assert done.returncode == 0, done.stderr
    paths = Settings.from_environ({"ORCH_HOME": str(fresh)}).paths
    with contextlib.closing(Store.open(paths.store, reserve=paths.reserve, reserve_bytes=4096)) as store:
        assert [job.id for job in asyncio.run(store.load_live())] == [ID]
    again = backup("restore", copied, "--home", fresh)
    assert again.returncode == 1, "a record is never written over"
    assert "backup.py:" in again.stderr


def test_old_copies_go_and_the_newest_stay(home: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    for day in range(1, 5):
        (copies / f"orch-2026010{day}T000000Z.sqlite3").touch()
    with contextlib.closing(in_use(home)):
        assert backup("write", copies, "--home", home, "--keep", 3).returncode == 0
    names = sorted(path.name for path in copies.iterdir())
    assert len(names) == 3
    assert names[:2] == ["orch-20260103T000000Z.sqlite3", "orch-20260104T000000Z.sqlite3"]


def test_a_damaged_copy_is_found_and_not_put_back(home: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite3"
    damaged.write_bytes(b"SQLite format 3\0" + os.urandom(8192))
    assert backup("check", damaged).returncode == 1
    assert backup("restore", damaged, "--home", home).returncode == 1
    assert list(home.iterdir()) == [] or not (home / "store.sqlite3").exists()


def test_a_home_without_a_record_is_named(home: Path, tmp_path: Path) -> None:
    done = backup("write", tmp_path / "copy.sqlite3", "--home", home)
    assert done.returncode == 1
    assert "name the home with --home" in done.stderr


# -- documents

OPERATIONS = sorted((ROOT / "docs/operations").glob("*.md"))


def test_documents_name_files_that_are_there() -> None:
    for found in {name for page in OPERATIONS for name in re.findall(r"deploy/[\w./-]*\w", page.read_text())}:
        assert (ROOT / found).exists() or found in {"deploy/systemd", "deploy/kubernetes/generated"}, found


def code_of(page: Path) -> str:
    """Return the code of a page: its blocks, without their comments, and its inline code."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    blocks = [re.sub(r"\s#.*", "", block) for block in blocks]  # the comment beside a command
    return "\n".join(blocks + re.findall(r"`[^`]+`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)))


def test_documents_and_alerts_name_commands_and_options_that_orch_has() -> None:
    commands = {entry.name for entry in ENTRIES}
    reference = (ROOT / "docs/cli.md").read_text()
    texts = {str(page): code_of(page) for page in (*OPERATIONS, *(ROOT / "docs/runbooks").glob("*.md"))}
    texts["alerts"] = "\n".join(f"{alert.summary}\n{alert.description}" for alert in rules.ALERTS)
    seen = set()
    for name, text in texts.items():
        for command, rest in re.findall(r"(?:^|[`/ ])orch (?!orch\b)([a-z]+)\b([^`\n|;&]*)", text):
            if name == "alerts" and command not in commands and not rest.startswith((" {{", " --")):
                continue  # prose: "the orch daemon"
            seen.add(command)
            assert command in commands, (name, command)
            for option in re.findall(r"(?<!\S)(--[a-z-]+)", rest):
                assert option in reference, (name, command, option)
    assert len(seen) > 12

"""Converts a tree of nodes to a `JobSpec` and back: pydantic reads the classes of `model`; its errors get line and column.

Pydantic returns no value where it finds an error, and rules that bind several keys must be applied anyway. So invalid
values are reported and removed, and the rest is read again.

For a key that job.yaml does not have, the message knows other systems' names for our keys: those of SkyPilot, dstack, Ray, Slurm, Kubernetes
(TrainJob, Job), Determined, torchrun and CI systems. Must not accept any of them: one word per idea, and a hint for the rest.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from orchestrator.spec.fields import STORED, TAG, ListNode, MapNode, Mark, Node, ScalarNode, walk
from orchestrator.spec.model import JobSpec
from orchestrator.spec.problems import BadValueError, Path, Problem, dotted, nearest, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

    from orchestrator.spec.fields import JsonValue, Key, Record

_WORKERS = "resources.num_workers"
_PER_WORKER = "resources.resources_per_worker"
_RESTARTS = "retry.max_restarts"

_SAME_IDEA: dict[str, str] = {
    "entrypoint": "command cmd run script program exec main commands args arguments train_script entry_point",
    "name": "job_name submission_id jobname task_name run_name experiment_name title",
    "working_dir": "workdir work_dir cwd chdir dir directory workspace project_dir code repo source_dir wd",
    "env": "envs env_vars envvars environment environment_variables variables vars export",
    "outputs": "output artifacts artifact_paths results output_files outputs_dir",
    "secrets": "secret credentials tokens secret_env",
    "runtime_env.pip": "pip requirements packages setup install conda dependencies_pip python_packages",
    "runtime_env.py_modules": "modules pythonpath",
    _WORKERS: "ntasks n_tasks tasks num_proc_per_node num_processes nproc nproc_per_node slots_per_trial slots replicas "
    "world_size num_ranks ranks workers worker_count num_tasks np ntasks_per_node num_processes_per_node parallelism",
    f"{_PER_WORKER}.gpu": "gpus gpus_per_worker gpu_per_worker num_gpus ngpus gpu_count gpus_per_task gres "
    "accelerators accelerator use_gpu entrypoint_num_gpus gpus_per_node gpu_num",
    f"{_PER_WORKER}.gpu_model": "gpu_type accelerator_type gpu_name gpu_models",
    f"{_PER_WORKER}.cpu": "cpus cpus_per_worker cpus_per_task num_cpus entrypoint_num_cpus cpu_count cores vcpus",
    f"{_PER_WORKER}.memory": "mem ram mem_per_cpu mem_per_gpu memory_per_worker entrypoint_memory",
    _PER_WORKER: "resources_per_node per_worker worker_resources trainer_resources requests limits bundle",
    "resources.placement_strategy": "placement placement_group topology",
    "queue": "partition resource_pool pool local_queue queue_name cluster",
    "priority": "qos priority_class priority_class_name nice importance",
    "preemptible": "preemptable spot use_spot spot_policy interruptible",
    "min_runtime": "preempt_exempt_time min_run_time minimum_runtime",
    "max_duration": "time timeout time_limit walltime wall_time timeout_minutes active_deadline_seconds max_run_duration "
    "max_runtime duration max_time deadline timeout_seconds",
    "stop_duration": "grace_period grace_time grace termination_grace_period_seconds signal kill_wait stop_timeout "
    "stop_grace_period",
    "depends_on": "dependency dependencies needs after requires upstream",
    "matrix": "array sweep searcher grid hyperparameter_search",
    "matrix.parameters": "hyperparameters params search_space axes",
    "matrix.max_concurrent": "max_parallel max_concurrent_trials parallel max_concurrency",
    f"{_RESTARTS}.user": "max_restarts_on_errors max_failures max_retries retries restarts backoff_limit requeue attempts "
    "max_attempts num_retries",
    "retry": "job_recovery restart_policy failure_policy failure_config on_failure retry_policy",
    _RESTARTS: "max_restart restart_limits budgets",
    "retry.exit_codes.retry": "recover_on_exit_codes retry_exit_codes",
    "retry.log_policies": "log_policy log_patterns log_rules",
    "retry.backoff": "back_off backoff_seconds retry_delay delay",
    "health.heartbeat_timeout": "heartbeat hang_timeout watchdog rank_heartbeat_timeout liveness_probe",
    "health.startup_timeout": "start_timeout initial_rank_heartbeat_timeout startup_probe",
    "health.progress": "progress_log log_monitoring progress_pattern",
    "checkpoint": "checkpoints checkpointing checkpoint_config checkpoint_storage",
    "checkpoint.storage_path": "checkpoint_dir checkpoint_path ckpt_dir save_dir storage host_path bucket",
    "checkpoint.keep_best": "save_top_k keep_top_k",
    "checkpoint.keep": "num_to_keep save_trial_best save_trial_latest save_total_limit max_to_keep keep_last top_k",
    "checkpoint.score_attribute": "checkpoint_score_attribute metric metric_for_best_model score monitor",
    "checkpoint.score_order": "checkpoint_score_order mode smaller_is_better greater_is_better order",
    "checkpoint.interval": "min_checkpoint_period checkpoint_interval save_steps save_interval checkpoint_frequency every",
    "telemetry": "profiling monitoring metrics",
    "telemetry.rate": "sampling_rate sample_rate frequency rate_hz",
    "trackers": "tracker report_to loggers logger tracking",
    "trainer": "trainer_config training trainer_args",
    "trainer.batch_size": "per_device_train_batch_size per_gpu_batch_size micro_batch_size train_micro_batch_size_per_gpu",
    "trainer.global_batch_size": "train_batch_size effective_batch_size",
    "trainer.gradient_accumulation_steps": "accumulate_grad_batches grad_accumulation_steps",
    "trainer.max_grad_norm": "gradient_clip_val gradient_clipping clip_grad_norm max_norm",
    "trainer.precision": "mixed_precision dtype",
    "trainer.use_gradient_checkpointing": "gradient_checkpointing activation_checkpointing",
    "trainer.num_workers": "dataloader_num_workers",
    "trainer.pin_memory": "dataloader_pin_memory",
    "trainer.compile": "torch_compile",
    "trainer.sync_bn": "sync_batchnorm convert_sync_batchnorm",
    "notify": "notifications notification webhooks webhook mail_user mail_type event_callback email callbacks alerts",
    "resources.node_labels": "node_selector constraint constraints node_affinity label_selector",
    "labels": "tags annotations metadata account project description comment",
}
"""Our key (a full path) -> other systems' names for it, in snake case."""

_NO_SUCH_IDEA: dict[str, str] = {
    "nodes": "orch places ranks: write resources.num_workers for their number, resources.nodes: [a, b] for where they may go",
    "num_nodes": "orch places ranks, not nodes: write resources.num_workers, nodes times ranks on each",
    "nnodes": "orch places ranks, not nodes: write resources.num_workers, nodes times ranks on each",
    "nodelist": "write resources.nodes: [a, b] for jobs that only some nodes can run; else the scheduler picks the nodes",
    "exclude_node": "the scheduler avoids nodes that fail; `orch nodes cordon` takes one out",
    "image": "ranks run in the daemon's own environment; name another interpreter in entrypoint",
    "image_id": "ranks run in the daemon's own environment; name another interpreter in entrypoint",
    "docker": "ranks run in the daemon's own environment; name another interpreter in entrypoint",
    "container": "ranks run in the daemon's own environment; name another interpreter in entrypoint",
    "python": "name the interpreter in entrypoint: /path/to/python train.py",
    "python_version": "name the interpreter in entrypoint: /path/to/python train.py",
    "file_mounts": "files under working_dir are copied; read larger data from a path",
    "volumes": "ranks see the node's own files; no mount is needed",
    "bind_mounts": "ranks see the node's own files; no mount is needed",
    "mounts": "ranks see the node's own files; no mount is needed",
    "shm_size": "ranks see the node's own /dev/shm; nothing to set",
    "suspend": "`orch pause JOB` suspends a job",
    "ttl_seconds_after_finished": "`orch prune` removes old jobs",
    "error": "`orch logs JOB` shows both streams of every rank",
    "log_dir": "`orch logs JOB` shows both streams of every rank",
    "stdout": "`orch logs JOB` shows both streams of every rank",
    "stderr": "`orch logs JOB` shows both streams of every rank",
    "api_version": "this looks like a Kubernetes manifest; `orch init SCRIPT` writes a job.yaml",
    "kind": "this looks like a Kubernetes manifest; `orch init SCRIPT` writes a job.yaml",
    "spec": "this looks like a Kubernetes manifest; `orch init SCRIPT` writes a job.yaml",
    "type": "there is one type of job; remove the key",
    "infra": "jobs run where the daemon runs; one with --ray-address uses a whole cluster",
    "cloud": "jobs run where the daemon runs; one with --ray-address uses a whole cluster",
    "region": "jobs run where the daemon runs; one with --ray-address uses a whole cluster",
    "instance_type": "orch uses the machines that are there; resources.resources_per_worker.gpu_model picks among them",
    "user": "a job belongs to the user who submits it; remove the key",
    "schedule": "submit from cron or a systemd timer",
    "begin": "submit when it is to start, or use depends_on",
    "world_size_per_node": "write resources.num_workers, over all nodes",
    "master_addr": "orch sets the rendezvous of every attempt itself",
    "master_port": "orch sets the rendezvous of every attempt itself",
    "backend": "write trainer.backend, or choose it in the script",
}
"""Names for which job.yaml has no key at all -> what to do instead."""

_LISTED = 10
_OURS = {word: key for key, words in _SAME_IDEA.items() for word in words.split()}


def snake(word: str) -> str:
    """Write `numProcPerNode`, `job-name` and `Time` the way the tables do: `num_proc_per_node`, `job_name`, `time`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word[:80]).replace("-", "_").lower()


def unknown_key(path: Path, key: str, siblings: Sequence[str], everywhere: Iterable[str]) -> BadValueError:
    """Explain a key that a record lacks: `path` is the record's, `everywhere` all full paths of job.yaml."""
    word = snake(key)
    here = ".".join(step for step in path if isinstance(step, str))
    ours = _OURS.get(word, "")
    at_home = [full for full in everywhere if full.rsplit(".", 1)[-1] == word and "[" not in full]
    # A key of the job goes before a key of `trainer` with the same name.
    at_home = [full for full in at_home if not full.startswith("trainer.")] or ([] if ours else at_home)
    message = "there is no such key"
    if word in siblings:
        return BadValueError(message, f"did you mean {word}?")
    if ours and ours.rpartition(".")[0] == here:
        return BadValueError(message, f"did you mean {ours.rpartition('.')[2]}?")
    if word in _NO_SUCH_IDEA:
        return BadValueError(message, _NO_SUCH_IDEA[word])
    if len(at_home) == 1:
        return BadValueError(message, f"it belongs elsewhere: {at_home[0]}")
    # Probably a typing error in one of our names, unless it is nearer to another system's name.
    alike = nearest(key, [*siblings, *_OURS, *_NO_SUCH_IDEA])
    if alike is not None and alike not in siblings and not ours:
        ours, alike = _OURS.get(alike, ""), nearest(key, siblings)
    meant = ours or alike
    if meant:
        return BadValueError(message, f"did you mean {meant}?")
    known = (
        "the settings of docs/training.md" if here == "trainer" else "the keys of docs/job-yaml.md and `orch schema`"
    )
    listed = ", ".join(siblings) if len(siblings) <= _LISTED else known
    return BadValueError(message, f"{_place(here)} has {listed}")


def _place(here: str) -> str:
    return quoted(here)[1:-1] if here else "a job"


_STAND_INS = {"name": "job", "entrypoint": "true"}
"""Values that replace invalid required keys of the file, so that the rest can be read."""
_MISSING, _UNKNOWN, _KEY = "missing", ("unexpected_keyword_argument", "extra_forbidden"), "[key]"


@cache
def adapter() -> TypeAdapter[JobSpec]:
    """Return pydantic's reader and writer of a job file; created once, in a process that needs it."""
    from pydantic import TypeAdapter

    return TypeAdapter(JobSpec)


@cache
def all_keys() -> dict[str, tuple[type[Record], Key]]:
    """Return every key by its full path, such as `retry.log_policies[].pattern`."""
    return {path: (record, key) for path, record, key in walk(JobSpec)}


def to_dict(spec: JobSpec) -> dict[str, JsonValue]:
    """Return the canonical JSON form, with every key. `job.from_dict` converts it back to the same spec, in this and later versions."""
    return cast("dict[str, JsonValue]", adapter().dump_python(spec, mode="json", by_alias=True))


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of job.yaml, for editors. It accepts all that `parse_job` accepts, and some more."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **adapter().json_schema(by_alias=True),
        "title": "job.yaml",
        "description": "A training job for orch.",
    }


def read_spec(root: MapNode, problems: list[Problem], *, stored: bool = False) -> JobSpec:
    """Read a job file's tree. Errors are added to `problems`; the spec has the defaults of invalid values.

    ``stored``: the tree was accepted before, so only values that cannot be used at all are errors.
    """
    from pydantic import ValidationError

    tree, faults = root, _Faults(root, problems)
    while True:
        try:
            return adapter().validate_python(tree, context=STORED if stored else None)
        except ValidationError as error:
            tree = faults.taken_out(error.errors(include_url=False, include_input=False))


def problem_at(error: BadValueError, mark: Mark, path: Path) -> Problem:
    """Return the problem of a bad value, with its place."""
    return Problem(
        line=mark.line,
        column=mark.column,
        path=dotted(path),
        message=error.message,
        hint=error.hint,
        source=mark.source,
    )


class _Faults:
    """The errors of a tree, by path, and the tree without the invalid values."""

    def __init__(self, root: MapNode, problems: list[Problem]) -> None:
        self._root = root
        self._problems = problems
        self._out: set[Path] = set()
        self._positions: dict[Path, list[int]] = {}
        """Indices of the items that remain in each list."""

    def taken_out(self, errors: list[ErrorDetails]) -> MapNode:
        """Report the errors, and return the tree without the values that they concern."""
        before = len(self._out)
        for error in errors:
            self._take(error)
        if len(self._out) == before:
            raise AssertionError(f"pydantic found something that cannot be taken out: {errors}")
        self._positions = {}
        tree = self._without(self._root, ())
        if not isinstance(tree, MapNode):
            raise TypeError("a job file is a mapping")
        return tree

    def _take(self, error: ErrorDetails) -> None:
        path, is_key = self._place(error["loc"])
        if error["type"] == _MISSING:
            if path not in self._out:  # else the file has the key, and its error has been reported
                self._report(BadValueError("is required", _known(path)[1].doc.text), path[:-1], path)
            self._out.add(path)
            if len(path) > 1:
                self._out.add(path[:-1])
            return
        self._out.add(path)
        if error["type"] in _UNKNOWN:
            siblings = [key.rpartition(".")[2] for key in all_keys() if key.rpartition(".")[0] == _general(path[:-1])]
            bad = unknown_key(path[:-1], str(path[-1]), siblings, all_keys())
            self._report(bad, path, path, at_key=True)
        else:
            self._report(_bad_value(error), path, path, at_key=is_key)

    def _place(self, location: tuple[int | str, ...]) -> tuple[Path, bool]:
        """Return the path in the whole tree, and whether the error is about a key of a mapping."""
        path: Path = ()
        for step in location:
            if isinstance(step, int):
                path = (*path, self._positions[path][step] if path in self._positions else step)
            elif not step.startswith(TAG):
                path = (*path, step)
        is_key = bool(path) and path[-1] == _KEY and _find(self._root, path)[1] is _find(self._root, path[:-1])[1]
        return (path[:-1], True) if is_key else (path, False)

    def _report(self, error: BadValueError, where: Path, path: Path, *, at_key: bool = False) -> None:
        key, value = _find(self._root, where)
        self._problems.append(problem_at(error, (key if at_key and key else value or self._root).mark, path))

    def _without(self, node: Node, path: Path) -> Node:
        match node:
            case MapNode():
                entries = [
                    (key, self._without(value, (*path, key.text)))
                    for key, value in node.entries
                    if (*path, key.text) not in self._out
                ]
                if not path:
                    entries += [(_text(key), _text(value)) for key, value in _STAND_INS.items() if (key,) in self._out]
                return replace(node, entries=tuple(entries))
            case ListNode():
                left = [index for index in range(len(node.items)) if (*path, index) not in self._out]
                self._positions[path] = left
                return replace(node, items=tuple(self._without(node.items[i], (*path, i)) for i in left))
            case _:
                return node


def _bad_value(error: ErrorDetails) -> BadValueError:
    context: dict[str, Any] = error.get("ctx", {})
    if "message" in context:
        return BadValueError(context["message"], context["hint"])
    bad = context.get("error")
    return bad if isinstance(bad, BadValueError) else BadValueError(error["msg"])


def _find(root: Node, path: Path) -> tuple[ScalarNode | None, Node | None]:
    """Return the key and the value at a path, or the nearest value above it that is written out."""
    key: ScalarNode | None = None
    node: Node = root
    for step in path:
        if isinstance(node, MapNode) and isinstance(step, str):
            key, found = next(((name, value) for name, value in node.entries if name.text == step), (None, None))
        elif isinstance(node, ListNode) and isinstance(step, int) and step < len(node.items):
            key, found = None, node.items[step]
        else:
            break
        if found is None:
            break
        node = found
    return key, node


def nearest_mark(root: Node, path: Path) -> Mark:
    """Return the mark of a value, or of the nearest one above it that is written out."""
    node = _find(root, path)[1]
    return (node or root).mark


def _general(path: Path) -> str:
    """Return the path with `[]` for every position."""
    text = ""
    for step in path:
        text += "[]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _known(path: Path) -> tuple[type[Record], Key]:
    return all_keys()[_general(path)]


def _text(text: str) -> ScalarNode:
    return ScalarNode(text=text, kind="text", mark=Mark(source=""))

"""Other systems' names for our keys, and the message for a key that job.yaml does not have.

The words are those of SkyPilot, dstack, Ray, Slurm, Kubernetes (TrainJob, Job), Determined, torchrun and CI systems.
Must not accept any of them: one word per idea, and a hint for the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from orchestrator.spec.problems import BadValueError, Path, nearest, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def named_keys() -> frozenset[str]:
    """Return every key of job.yaml that has another system's name in the table."""
    return frozenset(_SAME_IDEA)


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

"""Options of launchers and batch systems: those that orch makes unnecessary, and what to write for others."""

from __future__ import annotations

NOT_NEEDED = frozenset(
    {
        *("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port"),
        *("node_rank", "local_addr", "monitor_interval", "start_method", "use_env", "role", "redirects", "tee"),
        *("log_dir", "local_ranks_filter", "logs_specs", "event_log_handler", "signals_to_handle", "no_python"),
        *("m", "module", "run_path", "multi_gpu", "main_process_ip", "main_process_port", "num_machines"),
        *("machine_rank", "same_network", "rdzv_timeout", "tee_file", "hostfile", "launcher", "no_ssh"),
        *("no_ssh_check", "no_local_rank", "force_multi", "save_pid", "ssh_port", "l", "label", "u", "unbuffered"),
        *("v", "verbose", "q", "quiet", "mpi", "cpu_bind", "gpu_bind", "ntasks", "n", "nodes", "N"),
        *("ntasks_per_node", "nnodes", "num_nodes", "num_gpus", "nproc_per_node", "num_processes", "np", "c"),
        *("job_name", "J", "output", "o", "error", "e", "open_mode", "allow_run_as_root", "bind_to_none"),
        *("num_cpu_threads_per_process", "no_wait", "requeue", "parsable", "wait_all_nodes", "kill_on_bad_exit", "K"),
    }
)
"""Options that orch makes unnecessary: it starts the ranks, creates the rendezvous, labels and keeps the output."""

INSTEAD = {
    "config_file": "its settings are not read; pass them as options of accelerate launch",
    "gpu_ids": "orch picks the GPUs",
    "include": "orch picks the GPUs; resources.num_workers says how many",
    "exclude": "orch picks the GPUs; `orch nodes cordon` keeps a node free",
    "nodelist": "orch picks the nodes",
    "w": "orch picks the nodes",
    "x": "orch picks the nodes; `orch nodes cordon` keeps one free",
    "partition": "queue: NAME, where queues divide your cluster",
    "p": "queue: NAME, where queues divide your cluster",
    "account": "labels: {account: NAME} keeps it for your own lists",
    "A": "labels: {account: NAME} keeps it for your own lists",
    "qos": "priority: 0 to 100",
    "gres": "resources.resources_per_worker.gpu",
    "gpus": "resources.resources_per_worker.gpu",
    "gpus_per_node": "resources.resources_per_worker.gpu",
    "constraint": "resources.resources_per_worker.gpu_model for the model of GPU",
    "C": "resources.resources_per_worker.gpu_model for the model of GPU",
    "array": "matrix: parameters, one job for each value",
    "a": "matrix: parameters, one job for each value",
    "dependency": "depends_on: [{job: NAME, on: success}]",
    "d": "depends_on: [{job: NAME, on: success}]",
    "signal": "orch sends SIGTERM; stop_duration is the time to save",
    "mail_type": "notify: [{url: ..., on: [FAILED]}]",
    "mail_user": "notify: [{url: ..., on: [FAILED]}]",
    "export": "env: for values, secrets: for names of your environment",
    "exclusive": "ask for as many GPUs and CPUs as a node has",
    "use_deepspeed": "let the script configure DeepSpeed",
    "deepspeed_config_file": "let the script configure DeepSpeed",
    "use_fsdp": "let the script configure FSDP",
    "dynamo_backend": "env.ACCELERATE_DYNAMO_BACKEND",
    "container_image": "runtime_env, or the interpreter's full path in entrypoint",
    "begin": "submit it then",
}
"""Advice for options that have no counterpart."""


def shown(option: str, value: str) -> str:
    """Return the option as a person types it."""
    dashes = "-" if len(option) == 1 else "--"
    joint = " " if len(option) == 1 else "="
    return f"{dashes}{option.replace('_', '-')}" + (f"{joint}{value}" if value else "")


def remark(launcher: str, option: str, value: str) -> str | None:
    """Return the remark about an option that has no key; None where orch does by itself what it requests."""
    if option in NOT_NEEDED:
        return None
    instead = INSTEAD.get(option, "")
    return f"{launcher} {shown(option, value)}: not carried over" + (f"; {instead}" if instead else "")

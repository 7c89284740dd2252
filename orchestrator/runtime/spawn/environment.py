"""The environment of a training process: torchrun's variables, orch's own, and which GPUs it sees.

Pure. Owns the names of variables; decides no values. A script must find here what it finds under torchrun
(tests/integration/test_torchrun_parity.py compares the two).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from orchestrator.spec.fields import looks_secret, set_by_orch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROLE_NAME = "default"

INHERITED: Final[Mapping[str, str]] = {
    "the account and the machine": "HOME USER LOGNAME SHELL HOSTNAME PATH TERM TMPDIR TMP TEMP XDG_* ORCH_HOME",
    "language and time": "LANG LANGUAGE LC_* TZ TZDIR",
    "proxies and certificates": "http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY"
    " SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
    "libraries and compilers": "LD_* MALLOC_* GLIBC_TUNABLES CPATH LIBRARY_PATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CC CXX MAX_JOBS",
    "Python": "PYTHON*",
    "threads and mathematics": "OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* BLIS_* NUMEXPR_* NUMBA_* ONEDNN_* DNNL_*",
    "GPUs": "CUDA_* CUDNN_* CUBLAS_* CUBLASLT_* CUTENSOR_* NVIDIA_* ROCM_* HIP_* HSA_* AMD_* MIOPEN_* ROCBLAS_* HIPBLASLT_* ZE_* SYCL_*"
    " ONEAPI_* IGC_*",
    "communication": "NCCL_* RCCL_* GLOO_* UCX_* UCC_* FI_* NVSHMEM_* CCL_* TP_SOCKET_IFNAME",
    "frameworks": "TORCH_* PYTORCH_* TORCHINDUCTOR_* TORCHDYNAMO_* TRITON_* ATEN_* XLA_*"
    " TF_CPP_* TF_ENABLE_* TF_FORCE_* TF_GPU_* TF_NUM_* TF_XLA_* TF_DETERMINISTIC_OPS JAX_* ACCELERATE_* DEEPSPEED_*",
    "data and models": "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_CACHE"
    " TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM WANDB_MODE WANDB_DIR MPLBACKEND MPLCONFIGDIR",
}
"""Variables of the daemon's environment that jobs get, by subject; ``*`` stands for the rest of a name."""

_NAMES: Final = frozenset(name for names in INHERITED.values() for name in names.split() if not name.endswith("*"))
_PREFIXES: Final = tuple(name[:-1] for names in INHERITED.values() for name in names.split() if name.endswith("*"))


def inheritable_environment(base: Mapping[str, str], passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the part of an environment that passes to jobs and fork servers: ``INHERITED``, and names and patterns of ``passed``.

    A variable whose name looks like a secret's passes only by its whole name, one that orch sets for each rank never.
    """
    return {name: value for name, value in base.items() if name in _NAMES or _passes(name, passed)}


def _passes(name: str, passed: Sequence[str]) -> bool:
    if set_by_orch(name) or (looks_secret(name) and name not in passed):
        return False
    return name.startswith(_PREFIXES) or any(fnmatchcase(name, pattern) for pattern in passed)


def visibility(vendor: str, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables that restrict runtimes of this vendor (``amd``, ``intel``, else NVIDIA) to these GPUs.

    ROCm numbers GPUs in two layers: HIP_VISIBLE_DEVICES, and CUDA_VISIBLE_DEVICES, which it also reads, count the GPUs
    that ROCR_VISIBLE_DEVICES leaves visible. ``gpus`` are numbers or UUIDs on the node.
    """
    listed = ",".join(gpus)
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": listed}
    if vendor == "amd":
        behind = ",".join(str(number) for number in range(len(gpus)))
        found |= {"CUDA_VISIBLE_DEVICES": behind, "HIP_VISIBLE_DEVICES": behind, "ROCR_VISIBLE_DEVICES": listed}
    elif vendor == "intel":
        found |= {"ZE_AFFINITY_MASK": listed}
    return found


def node_environment(
    *,
    base: Mapping[str, str],
    job_env: Mapping[str, str],
    job_id: str,
    attempt: int,
    world_size: int,
    local_world_size: int,
    group_rank: int,
    group_world_size: int,
    master_addr: str,
    master_port: int,
    restart_count: int,
    max_restarts: int,
    visible_gpus: Sequence[str],
    checkpoint_dir: str,
    resume_from: str | None,
    previous_step: int | None = None,
    working_dir: str | None = None,
    error_file: str = "",
    vendor: str = "",
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return what the environments of all of an attempt's ranks on one node have in common.

    `base` is what jobs inherit of the environment that the daemon was started with, not of a Ray worker's (Ray sets OMP_NUM_THREADS there);
    `job_env`, the job's `env` and secrets, takes precedence over it, but not over the rank's own variables. Groups are what
    torchrun calls nodes: `group_rank` counts the job's nodes, 0 to `group_world_size` - 1. `visible_gpus` names, by
    index or UUID, *all* of the job's GPUs on this node in the order of LOCAL_RANK, so that `cuda:{LOCAL_RANK}` is the
    rank's own; empty: the ranks see none. `previous_step` is the highest step that an earlier attempt reached;
    `error_file` is where torch's `@record` writes an exception, empty for nowhere; `extra` adds further ORCH_*
    variables, such as the settings of the checkpoint.
    """
    env = {**base, **job_env}
    if local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, for ranks that share a machine
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env |= {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(group_world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": ROLE_NAME,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": error_file,
        **visibility(vendor, visible_gpus),
        "ORCH_JOB_ID": job_id,
        "ORCH_ATTEMPT": str(attempt),
        "ORCH_CHECKPOINT_DIR": checkpoint_dir,
    }
    optional = {
        "ORCH_RESUME_FROM": resume_from,
        "ORCH_PREVIOUS_STEP": None if previous_step is None else str(previous_step),
        "PWD": working_dir,
    }
    return env | {name: value for name, value in optional.items() if value is not None} | dict(extra or {})


def rank_environment(
    node: Mapping[str, str], *, rank: int, local_rank: int, progress_path: str | None, process_tree: str = ""
) -> dict[str, str]:
    """Return the complete environment of one rank on a node whose ranks have ``node`` in common.

    ``process_tree`` marks the rank's processes and all their descendants.
    """
    env = {**node, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)}
    if progress_path is not None:
        env["ORCH_PROGRESS_PATH"] = progress_path
    if process_tree:
        env["ORCH_PROCESS_TREE"] = process_tree
    return env

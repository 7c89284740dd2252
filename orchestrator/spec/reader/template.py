"""The job.yaml that `orch init` writes for a script. Must not touch the disk."""

from __future__ import annotations

import posixpath
import re
import shlex

from orchestrator.spec.entrypoint import EntrypointError, parse_entrypoint, yaml_line

_YAML_WORDS = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
_TEMPLATE = """\
# A job for orch. Check it with `orch submit --dry-run`; every key is explained in docs/job-yaml.md.
# A key behind a # shows its default or an example; remove the # to set it.
version: 1
{name}
{entrypoint}
working_dir: .                      # copied at submission, so that a restart runs what was submitted
#env: {{TOKENIZERS_PARALLELISM: "false"}}
#secrets: [HF_TOKEN]                # names only; values come from your environment, masked in logs

resources:
  num_workers: 1                    # ranks; orch starts them as torchrun would
  resources_per_worker:
    gpu: 1                          # for each rank; 0 runs on the CPU, 0.5 shares one
    cpu: 1
    #memory: 8GB                    # 10^9 bytes each; 8GiB is 2^30
  #placement_strategy: PACK         # or STRICT_PACK, SPREAD, STRICT_SPREAD

#queue: default
#priority: 50                       # 0-100, higher first
#preemptible: true
#max_duration: 24h                  # stopped after
#stop_duration: 5m                  # from SIGTERM to SIGKILL: time to save

#retry:
#  max_restarts: {{user: 0, infra: 10, hang: 2, preemption: unlimited}}
#  max_no_progress: 3               # restarts in a row without a newer checkpoint
#  backoff: {{initial: 1s, max: 10m}}
#  exit_codes: {{retry: [75]}}
#  log_policies: [{{pattern: "CUDA out of memory", action: fail}}]

#health:
#  startup_timeout: 10m
#  heartbeat_timeout: auto          # learned from the job's own step times
#  on_hang: restart                 # or notify, the default for scripts that report nothing

#checkpoint:
#  keep: 3
#  score_attribute: loss            # keeps the best as well
#  score_order: min
#  interval: auto                   # or a number of steps, or a time such as 10m

#telemetry: {{rate: 1, record: true}}
#labels: {{team: vision}}
"""


def init_text(script: str, *, python: str = "python") -> str:
    """Write a commented job.yaml that runs a script: `.py` files with `python`, `.sh` files with bash.

    Raises:
        EntrypointError: the script's name is not allowed in an entry point (empty, or with a line break).

    """
    if "\n" in script:  # a backslash before it would be read as a continued line
        raise EntrypointError("a script's name with a line break is not allowed in an entry point", "rename the script")
    path = f"./{script}" if script.startswith("-") else script
    words: tuple[str, ...]
    if script.endswith(".sh"):
        words = ("bash", path)
    elif script.endswith(".py") or "/" not in script:
        words = (python, path)
    else:
        words = (path,)
    entrypoint = shlex.join(words)
    parse_entrypoint(entrypoint)
    return _TEMPLATE.format(name=f"name: {_name(script)}", entrypoint=yaml_line("entrypoint", entrypoint))


def _name(script: str) -> str:
    """Derive a job's name from a script's: `Train_v2.py` gives `train-v2`."""
    stem = posixpath.basename(script).rsplit(".", 1)[0].lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    if not name[:1].isalpha() or name in _YAML_WORDS:
        name = f"job-{name}"
    return name[:50].strip("-")

"""A job's ``runtime_env``: Ray installs it, and the rank's process starts inside of it.

Such a rank starts cold: the fork of a process that has imported everything already would not use it. Uploading
directories needs ``ray._private.runtime_env``, which only this module uses; ``tests/integration/test_ray_cluster.py``
fails when a new Ray breaks it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.spec.model import RuntimeEnvSpec

_MADE_BY_RAY: Final = "/runtime_resources/"
ERROR_CHARACTERS: Final = 600


def for_ray(spec: RuntimeEnvSpec, modules: Path) -> dict[str, Any]:
    """Return an actor's ``runtime_env`` option; empty for none. Uploads modules that the cluster lacks; blocking.

    ``modules`` holds the job's own copies of ``py_modules``, by their last names.
    """
    found: dict[str, Any] = {}
    if spec.pip:
        found["pip"] = list(spec.pip)
    if spec.py_modules:
        from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

        paths = [str(modules / Path(each).name) for each in spec.py_modules]
        found |= upload_py_modules_if_needed({"py_modules": paths}, include_gitignore=True, scratch_dir=str(modules))
    return found


def inside(plan: RankPlan, environ: Mapping[str, str], executable: str) -> RankPlan:
    """Return a rank's plan for an actor that runs in what Ray installed: its modules, its interpreter, a cold start.

    ``environ`` and ``executable`` are the actor's own.
    """
    if not plan.runtime_env:
        return plan
    env = dict(plan.env)
    search = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if _MADE_BY_RAY in part]
    if search:
        env["PYTHONPATH"] = os.pathsep.join([*search, *filter(None, [env.get("PYTHONPATH")])])
    if "pip" not in plan.runtime_env:
        return replace(plan, env=env, cold=True)
    home = Path(executable).parent
    env |= {"VIRTUAL_ENV": str(home.parent), "PATH": f"{home}{os.pathsep}{env.get('PATH', '')}"}
    env.setdefault("PYTHONUNBUFFERED", "1")
    if plan.mode == "command":
        target = executable if plan.target == plan.python else plan.target
        return replace(plan, env=env, cold=True, target=target)
    program = ("-m", plan.target) if plan.mode == "module" else (plan.target,)
    args = (*plan.python_options, *program, *plan.args)
    return replace(plan, env=env, cold=True, mode="command", target=executable, args=args, python_options=())

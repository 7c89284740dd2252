"""The daemon's page draws what a real job on simulated GPUs recorded, without another service."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import httpx

from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SPEC = """\
version: 1
name: drawn
entrypoint: python train.py
resources: {num_workers: 2, resources_per_worker: {gpu: 1, cpu: 0.1}}
"""
TRAIN = """\
import time
from orchestrator.train import context

ctx = context()
for step in range(1, 10**9):
    time.sleep(0.05)
    ctx.report(step=step, total_steps=10**9, loss=1.0 / step)
    if ctx.should_stop():
        break
"""
CHARTS = {"loss", "step time", "step time by rank", "GPU load", "GPU memory", "GPU power"}


def test_what_a_job_recorded_is_drawn_while_it_runs_and_after_it_has_ended(stack: Stack, tmp_path: Path) -> None:
    link = json.loads(stack.orch("ui", "--json").stdout)["url"]
    with httpx.Client(
        base_url=link.partition("/signin")[0], timeout=PATIENCE_SECONDS, follow_redirects=True
    ) as browser:
        browser.get(link)
        job_id = stack.submit(SPEC, tmp_path, train=TRAIN)

        def drawn() -> bool:
            text = browser.get(f"/jobs/{job_id}").text
            return set(re.findall(r"<figcaption><strong>(.*?)</strong>", text)) >= CHARTS

        wait_until("every chart is drawn", drawn, interval=0.5)
        (row, *_) = (row for row in stack.client.gpus() if row.job_id == job_id)
        node = browser.get(f"/nodes/{row.node}?gpu={row.gpu_uuid}")
        assert node.status_code == 200
        stack.client.cancel(job_id)
        stack.wait(job_id)
        assert drawn()
        assert job_id in browser.get(f"/nodes/{row.node}?gpu={row.gpu_uuid}").text

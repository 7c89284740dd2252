"""The lines of common trainers, as they print them; lines that only look like them; and a sequence of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.runtime.ranks.output import LogProgress, known_step
from orchestrator.train.script.progress_reading import ProgressSnapshot

BLANK = ProgressSnapshot()


@pytest.mark.parametrize(
    ("line", "step", "total"),
    [
        ("  2%|▏         | 12/500 [00:03<02:10,  3.75it/s]", 12, 500),  # Hugging Face's Trainer
        ("  0%|          | 0/500 [00:00<?, ?it/s]\r  1%|          | 5/500 [00:01<01:39,  5.0it/s]", 5, 500),
        ("Training:  50%|█████     | 1,000/2,000 [10:00<10:00,  1.67it/s, loss=0.3]", 1000, 2000),
        ("Steps:  50%|█████     | 10/20 [00:01<00:01, 10.00it/s, lr=1e-5, step_loss=0.1]", 10, 20),  # diffusers
        ("Epoch 0:  50%|█████     | 5/10 [00:00<00:00, 20.1it/s, v_num=0, train_loss=0.5]", 5, None),  # Lightning
        ("Epoch 2: 100%|██████████| 10/10 [00:00<00:00, 20.1it/s, v_num=0]", 30, None),
        ("Epoch 1/3:  40%|████      | 4/10 [00:00<00:00, 20.1it/s]", 4, 30),
        ("Epoch 1/4 ━━━━━━━━━━━━━━━━╸━━━━━━━ 8/20 0:00:01 • 0:00:02 12.00it/s", 28, None),
        ("iter 100: loss 2.4512, time 30.12ms, mfu 12.30%", 100, None),  # nanoGPT
        ("step 2000: train loss 1.9, val loss 2.0", 2000, None),
        ("step 00010/01000 (1.00%) | loss: 5.4 | lrm: 1.00", 10, 1000),  # nanochat
        ("2026-11-24 12:00:00 INFO Step 7, loss 0.1", 7, None),
        ("global_step=12 loss=0.25", 12, None),
        ("[iteration 40 of 100] loss 3", 40, 100),
    ],
)
def test_the_lines_of_common_trainers_are_known(line: str, step: int, total: int | None) -> None:
    found = known_step(line)
    assert found is not None
    assert (found.step, found.total) == (step, total)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Map:  45%|████▌     | 450/1000 [00:01<00:01, 400 examples/s]",
        "Loading weights: 100%|██████████| 20/20 [00:00<00:00]",
        "Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00]",
        "{'loss': 0.5, 'learning_rate': 5e-05, 'epoch': 0.1}",
        "step 3 of preparing data",
        "steps per second 12, loss 3",
        "loss 3",
        "step 1.5 loss 2",
        "step 12/10 loss 2",
        " 120%|██████████| 12/10 [00:00<00:00]",
        "  2%|▏         | 12/500",
        "iter 99999999999999999999999: loss 1",
        "%|" * 1000,
        "━" * 5000,
    ],
)
def test_what_only_looks_like_one_is_none(line: str) -> None:
    assert known_step(line) is None


@pytest.mark.parametrize(
    "line", ["step " * 200_000 + "loss", "9" * 10**6 + "%|", "Epoch 1 " + "━" * 10**6, " " * 10**6]
)
def test_a_hostile_line_takes_no_time(line: str) -> None:
    before = time.process_time()
    for _ in range(20):
        known_step(line[-1000:] + line[:1000])
    assert known_step(line) is None
    assert before >= 0


def test_guesses_are_shown_as_guesses_and_an_evaluation_does_not_move_them() -> None:
    async def story() -> None:
        found = LogProgress("", 3, lambda _: None)
        found.feed("Map: 100%|██████████| 1000/1000 [00:01<00:00]")
        found.feed("  1%|          | 5/500 [00:01<01:39,  5.0it/s]")
        async with asyncio.timeout(300):
            while found.over(BLANK).step != 5:  # noqa: ASYNC110 - lines are looked at in batches
                await asyncio.sleep(0.01)
        found.feed("100%|██████████| 13/13 [00:01<00:00, 9.9it/s]")
        found.feed("step 900: loss 1")
        found.feed("  2%|          | 10/500 [00:02<01:39,  5.0it/s]")
        await found.close()
        shown = found.over(BLANK)
        assert (shown.step, shown.total_steps, shown.guessed) == (10, 500, True)
        assert (shown.new_step, shown.steps_reported, shown.recent_step_seconds) == (None, 0, ())
        own = ProgressSnapshot(step=1)
        assert found.over(own) is own

    asyncio.run(story())

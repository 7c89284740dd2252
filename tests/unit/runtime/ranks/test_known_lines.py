"""The lines of common trainers, as they print them; lines that only look like them; and a sequence of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.runtime.ranks.output import KnownLines, LogProgress, may_match
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
        ("Epoch 1/4 ━━━━━━━━━━━━━━━━╸━━━━━━━ 8/20 0:00:01 • 0:00:02 12.00it/s", 28, 100),
        ("iter 100: loss 2.4512, time 30.12ms, mfu 12.30%", 100, None),  # nanoGPT
        ("step 2000: train loss 1.9, val loss 2.0", 2000, None),
        ("step 00010/01000 (1.00%) | loss: 5.4 | lrm: 1.00", 10, 1000),  # nanochat
        ("2026-11-24 12:00:00 INFO Step 7, loss 0.1", 7, None),
        ("global_step=12 loss=0.25", 12, None),
        ("[iteration 40 of 100] loss 3", 40, 100),
        ("120it [00:12, 10.01it/s]", 120, None),
        ("Epoch 0/9:  40%|████      | 4/10 [00:00<00:00, 20.1it/s, v_num=0]", 4, 100),  # Lightning, newer
        ("Epoch [2/4]:  40%|████      | 4/10 [00:00<00:00, 20.1it/s, loss=1]", 14, 40),
        ("loss: 0.345:  40%|████      | 4/10 [00:00<00:00, 20.1it/s]", 4, 10),
        ("Training ━━━━━━━━━━━╸━━━━━━━━━━━━━━━━ 25/60 0:00:25 0:00:35", 25, 60),
        ("Training... ━━━━━━━━━━━╸━━━━━━━━━━━━━━━━ 42% 25/60 0:00:35", 25, 60),
        # torchtitan
        (
            (
                "[titan] 2026-11-24 12:00:00,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.8562  \x1b[38;2;180;60;0mgrad_norm:"
                "  3.1  \x1b[38;2;54;234;195mmemory: 40.43GiB(42.55%)  \x1b[34mtps: 2,345  \x1b[36mtflops: 12.1  \x1b[35mmfu: 40.1%\x1b[39m"
            ),
            10,
            None,
        ),
        # Megatron-LM
        (
            (
                " [2026-11-24 12:00:00] iteration       10/     500 | consumed samples:          160 | elapsed time per iteration"
                " (ms): 1234.5 | learning rate: 1.500000E-04 | global batch size:    16 | lm loss: 9.1E+00 | loss scale: 1.0 |"
            ),
            10,
            500,
        ),
        # MMEngine: by epochs, and by iterations
        (
            "11/24 12:00:00 - mmengine - INFO - Epoch(train)   [2][ 50/196]  lr: 1.0000e-02  eta: 0:03:10  time: 0.2  loss: 6.9",
            442,
            None,
        ),
        (
            "11/24 12:00:00 - mmengine - INFO - Iter(train) [   50/20000]  base_lr: 1.0e-02 lr: 1.0e-02  eta: 5:00:00  loss: 2.9",
            50,
            20000,
        ),
        # YOLO: Ultralytics with tqdm, with its own bar; YOLOv5
        (
            "      2/100      2.51G      1.155      3.086      1.244        215        640:  25%|██▌       | 1/4 [00:01<00:03]",
            5,
            400,
        ),
        (
            "      2/100      2.51G      1.155      3.086      1.244        215        640: 25% ━━━───────── 1/4 3.5it/s 1.1s<3.2s",
            5,
            400,
        ),
        (
            "        0/2         0G    0.1155     0.0308      0.1244        215        640:  25%|██▌       | 1/4 [00:01<00:03]",
            1,
            12,
        ),
        # fairseq: without a bar, with one, as JSON
        (
            "2026-11-24 12:00:00 | INFO | train_inner | epoch 002:    100 / 1500 loss=12.3, ups=3.2, num_updates=1600, lr=0.1",
            1600,
            None,
        ),
        ("epoch 002:   7%|▋      | 100/1500 [00:10<02:20,  9.9it/s, loss=12.3, num_updates=1600, lr=0.1]", 1600, None),
        ('{"epoch": 2, "update": 1.067, "loss": "12.3", "num_updates": "1600", "lr": "0.1"}', 1600, None),
        # Keras 3 and 2, with an only epoch
        (
            "\x1b[1m 12/100\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━━━━━━━\x1b[0m \x1b[1m3s\x1b[0m 40ms/step - loss: 2.3",
            12,
            100,
        ),
        (" 12/100 [==>...........................] - ETA: 3s - loss: 2.3026", 12, 100),
        ("Epoch: [0][ 10/5005]\tTime  0.5 ( 0.6)\tData  0.1 ( 0.2)\tLoss 6.9e+00 (7.0e+00)", 10, None),  # torchvision
        ("Train: 0 [  50/312 ( 16%)]  Loss: 6.9 (6.9)  Time: 0.2s", 50, None),  # timm
        (
            "[11/24 12:00:00 d2.utils.events]:  eta: 0:10:00  iter: 19  total_loss: 3.3  loss_cls: 1.2",
            19,
            None,
        ),  # detectron2
        ("Epoch [1/5], Step [100/600], Loss: 0.3", 100, 3000),
    ],
)
def test_the_lines_of_common_trainers_are_known(line: str, step: int, total: int | None) -> None:
    found = KnownLines().step(line)
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
        "Epoch(val)  [2][ 50/196]  loss: 6.9",
        "Epoch 1/3 [val]:  40%|████      | 4/10 [00:00<00:00, 20.1it/s]",
        "                 Class     Images  Instances      Box(P          R      mAP50): 100%|██████████| 2/2 [00:01<00:00]",
        "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3",  # samples
        "Tokenizing training data: 120it [00:12, 10.01it/s]",
        "Downloading ━━━━━━━━━━━━━━━━ 25/60 0:00:25",
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
    assert KnownLines().step(line) is None


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (
            [
                "Epoch 2/3",
                " 12/100 [==>......] - ETA: 3s - loss: 2.3",
                "Epoch 3/3",
                "  1/100 [>......] - ETA: 3s - loss: 2",
            ],
            [(112, 300), (201, 300)],
        ),
        (["Overriding: max_iters = 2000", "iter 100: loss 2.4512, time 30.12ms, mfu 12.30%"], [(100, 2000)]),
        (["  train_iters ..................................... 500", "iteration 10 | lm loss: 9"], [(10, 500)]),
        (
            [
                "Training starts at step 1, with local batch size 8, total steps 1000 (warmup 200)",
                "step:  1  loss: 12.2",
            ],
            [(1, 1000)],
        ),
        (
            ["Epoch 0/1 ━━╸━ 8/20 0:00:01 • 0:00:02 12.00it/s", "Epoch 1/1 ━━╸━ 8/20 0:00:01 • 0:00:02 12.00it/s"],
            [(8, 40), (28, 40)],
        ),
    ],
)
def test_what_other_lines_tell_completes_a_step(lines: list[str], steps: list[tuple[int, int]]) -> None:
    known = KnownLines()
    assert [(found.step, found.total) for line in lines if (found := known.step(line))] == steps
    assert all(may_match(line) for line in lines)


@pytest.mark.parametrize(
    "line", ["step " * 200_000 + "loss", "9" * 10**6 + "%|", "Epoch 1 " + "━" * 10**6, " " * 10**6]
)
def test_a_hostile_line_takes_no_time(line: str) -> None:
    before = time.process_time()
    for _ in range(20):
        KnownLines().step(line[-1000:] + line[:1000])
    assert KnownLines().step(line) is None
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

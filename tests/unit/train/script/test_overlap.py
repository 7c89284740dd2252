"""Saves that overlap with training: the saved state is that at the save, or the checkpoint before stays the newest."""

import copy
import signal
import textwrap
import threading
import warnings
from concurrent.futures import Executor, Future

import pytest
import torch

from orchestrator.checkpoint.snapshots.async_copy import REHEARSALS, OptimizerGuard, Watch, may_wait
from orchestrator.checkpoint.snapshots.reader import SnapshotReader
from orchestrator.checkpoint.snapshots.tensor_copy import TensorCopy
from orchestrator.train.script.checkpoint_report import CheckpointWarning
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.saving import Saver
from tests.support import warm


class Awaited(Future):
    """A future that sets an event when its result is awaited."""

    def __init__(self):
        super().__init__()
        self.awaited = threading.Event()

    def result(self, timeout=None):
        self.awaited.set()
        return super().result(timeout)


class Gate(Executor):
    """Executor that runs its calls when it is opened."""

    def __init__(self):
        self.work = []

    def submit(self, call, /, *args, **kwargs):
        future = Awaited()
        self.work.append((future, lambda: call(*args, **kwargs)))
        return future

    def open(self):
        for future, call in self.work:
            future.set_result(call())
        self.work.clear()


class Training:
    """A model with batch norm, and with weights that are large enough to be copied late."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 512)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def passes(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 512)).square().mean().backward()

    def step(self):
        self.passes()
        self.optimizer.step()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.fixture
def saver(tmp_path, page):
    """Yield a function that makes savers; ``saver(gate)`` copies late when the gate is opened."""
    made = []

    def make(gate=None, **environ):
        environ = {
            **environ,
            "ORCH_JOB_ID": "j",
            "ORCH_ATTEMPT": "1",
            "ORCH_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "ORCH_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        }
        found = Saver(read_environment(environ), page, gate)
        made.append(found)
        return found

    yield make
    for one in made:
        one.leave()


class Told:
    """A schedule that records its calls."""

    def __init__(self):
        self.waits, self.lost_saves = [], 0

    def waited(self, *, stall_seconds, cost_seconds):
        self.waits.append((stall_seconds, cost_seconds))

    def lost(self):
        self.lost_saves += 1


def save(saver, training, step, overlap=True):
    return saver.save(training.state(), step=step, rank_state=None, metrics={}, overlap=overlap)


def newest(tmp_path):
    reader = SnapshotReader(tmp_path / "snapshots", job_id="j")
    return reader.load(reader.newest(), 0, 1)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def begun(saver):
    """Return a run with its first save done, which is never late, since no optimizer has been seen yet."""
    training = Training()
    training.step()
    assert save(saver, training, 1)
    training.step()
    return training


def test_training_goes_on_and_the_optimizers_step_waits_for_the_rest(saver, page, tmp_path):
    gate = Gate()
    one = saver(gate)
    one.schedule = Told()
    training = begun(one)
    assert page.read().snapshot_step == 1
    expected = copy.deepcopy(training.state())
    assert save(one, training, 2)
    ((future, _),) = gate.work
    training.passes()  # batch norm's sums change here
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    assert future.awaited.wait(300)
    assert same(training.state()["optimizer"], expected["optimizer"])
    assert (page.read().snapshot_step, page.read().saves) == (1, 1)
    assert newest(tmp_path).step == 1
    gate.open()
    stepping.join(300)
    assert not stepping.is_alive()
    assert not same(training.state()["optimizer"], expected["optimizer"])
    assert (page.read().snapshot_step, page.read().saves) == (2, 2)
    ((waited, cost),) = one.schedule.waits
    assert page.read().save_seconds > waited > cost > 0
    loaded = newest(tmp_path)
    assert loaded.step == 2
    assert same(loaded.state, expected)


def add_one(tensor):
    with torch.no_grad():
        tensor[0, 0] += 1


def swap_in_average(tensor):
    tensor.data.copy_(torch.zeros_like(tensor))


@pytest.mark.parametrize("change", [add_one, swap_in_average])
def test_a_state_that_is_changed_meanwhile_is_not_saved_and_the_one_before_stays(saver, page, tmp_path, change):
    gate = Gate()
    one = saver(gate)
    one.schedule = Told()
    training = begun(one)
    assert save(one, training, 2)
    change(training.model[0].weight)
    with pytest.warns(CheckpointWarning, match="step 2 not saved: the state was changed"):
        gate.open()
    seen = page.read()
    assert (seen.snapshot_step, seen.checkpoint.failed_saves) == (1, 1)
    assert "no longer overlap" in seen.checkpoint.failure
    assert one.schedule.lost_saves == 1
    assert newest(tmp_path).step == 1
    training.step()
    expected = copy.deepcopy(training.state())
    assert save(one, training, 3)
    assert gate.work == []  # from now on, states are copied at once
    assert same(newest(tmp_path).state, expected)


def test_a_copy_that_fails_costs_its_save_and_no_training(saver, page, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    gate = Gate()
    one = saver(gate)
    training = begun(one)
    save(one, training, 2)
    with monkeypatch.context() as patch:
        patch.setattr(TensorCopy, "copy", fail)
        with pytest.warns(CheckpointWarning, match=r"step 2 not saved: .* no room"):
            gate.open()
    training.step()
    assert page.read().checkpoint.failed_saves == 1
    assert save(one, training, 3)
    assert newest(tmp_path).step == 3


def test_by_default_three_saves_are_rehearsals(saver, tmp_path):
    gate = Gate()
    one = saver(gate)
    one.schedule = Told()
    training = begun(one)
    for step in range(2, 2 + REHEARSALS):
        assert save(one, training, step, overlap=None)
        assert (gate.work, newest(tmp_path).step) == ([], step)  # copied at once
        training.step()
    assert [cost for _, cost in one.schedule.waits] == [0.0] * REHEARSALS
    expected = copy.deepcopy(training.state())
    assert save(one, training, 9, overlap=None)
    assert len(gate.work) == 1
    assert newest(tmp_path).step < 9
    gate.open()
    training.step()
    assert same(newest(tmp_path).state, expected)
    assert save(one, training, 10, overlap=False)
    assert (gate.work, newest(tmp_path).step) == ([], 10)


def change_one_silently(tensor):
    tensor.data[3, 4] += 1


@pytest.mark.parametrize("change", [add_one, swap_in_average, change_one_silently])
def test_a_rehearsal_that_goes_wrong_loses_nothing_and_all_saves_are_whole(saver, page, tmp_path, change):
    gate = Gate()
    one = saver(gate)
    training = begun(one)
    save(one, training, 2, overlap=None)
    training.passes()
    change(training.model[0].weight)
    training.optimizer.step()
    for step in range(3, 5 + REHEARSALS):
        assert save(one, training, step, overlap=None)
        assert newest(tmp_path).step == step
        training.step()
    assert gate.work == []
    assert page.read().checkpoint.failed_saves == 0
    save(one, training, 20)  # the caller sets ``overlap``
    assert len(gate.work) == 1
    gate.open()


def test_a_rehearsal_that_sees_no_optimizer_step_proves_nothing(saver):
    gate = Gate()
    one = saver(gate)
    training = begun(one)
    for step in range(2, 5 + REHEARSALS):
        save(one, training, step, overlap=None)
    one.load()
    training.step()
    save(one, training, 20, overlap=None)
    assert gate.work == []


@pytest.mark.parametrize(("ranks", "late"), [(1, 1), (2, 0)])
def test_where_several_ranks_store_a_part_all_is_copied_at_once(saver, ranks, late):
    gate = Gate()
    one = saver(gate, RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(ranks))
    training = begun(one)
    for step in range(2, 3 + REHEARSALS):
        assert one.save(training.state(), step=step, rank_state={"own": step}, metrics={})
        if step < 2 + REHEARSALS:
            training.step()
    assert len(gate.work) == late
    gate.open()


@pytest.mark.parametrize("overlap", [True, None])
def test_what_is_saved_is_the_state_at_the_save_at_every_step(saver, tmp_path, overlap):
    one = saver()
    training = begun(one)
    for step in range(2, 30):
        training.step()
        expected = copy.deepcopy(training.state())
        save(one, training, step, overlap=overlap)
        training.step()
        loaded = newest(tmp_path)
        assert loaded.step == step
        assert same(loaded.state, expected)


def test_a_load_and_the_next_save_wait_for_the_rest(saver):
    one = saver()
    training = begun(one)
    save(one, training, 2)
    assert one.load().step == 2
    training.step()
    save(one, training, 3)
    save(one, training, 4)
    assert one.load().step == 4


def test_what_is_no_optimizers_own_small_or_not_dense_is_copied_at_once(saver):
    large, small = torch.nn.Parameter(torch.zeros(512, 512)), torch.nn.Parameter(torch.zeros(8))
    strided = torch.nn.Parameter(torch.zeros(512, 512).t())
    optimizer = torch.optim.SGD([large, small, strided], lr=1.0, momentum=0.9)
    for parameter in (large, small, strided):
        parameter.grad = torch.ones_like(parameter)
    calls = []
    guard = OptimizerGuard(lambda: calls.append(large[0, 0].item()))
    try:
        assert guard.addresses() == set()
        optimizer.step()
        assert calls == [0.0]  # before the step
        addresses = guard.addresses()
        momentum = optimizer.state[large]["momentum_buffer"]
        assert may_wait(large.detach(), addresses)
        assert may_wait(momentum, addresses)
        assert not may_wait(small.detach(), addresses)
        assert not may_wait(strided.detach(), addresses)
        assert not may_wait(torch.zeros(512, 512), addresses)
        with torch.inference_mode():
            uncounted = torch.zeros(512, 512)
        assert not may_wait(uncounted, {uncounted.data_ptr()})
        del optimizer, momentum
        assert guard.addresses() == set()
    finally:
        guard.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none_are_equal_to_themselves(dtype):
    tensor = torch.full((65, 65), float("nan"), dtype=dtype)  # its size is not a multiple of 8 bytes
    watch = Watch([tensor])
    assert not watch.saw_change([tensor.clone()])
    assert not watch.saw_any_change([tensor.clone()])
    before = tensor.clone()
    tensor.data[64, 63] = 1.0
    assert watch.saw_any_change([before])
    tensor[0, 0] = 1.0
    assert watch.saw_change([tensor.clone()])


def test_a_tensor_that_has_become_another_has_changed():
    parameter = torch.nn.Parameter(torch.zeros(512, 512))
    watch = Watch([parameter])
    copied = parameter.detach().clone()
    parameter.data = torch.zeros(8)
    assert watch.saw_any_change([copied])


SCRIPT = """
import os, signal, sys
from concurrent.futures import Executor, Future
import torch
from orchestrator.train import context

class Shut(Executor):
    def submit(self, call, /, *args, **kwargs):
        return Future()

torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.Adam(model.parameters())
ctx = context()
if "{late}" == "never":
    ctx._saver._late_copies = Shut()

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()

for number in (1, 2):
    step()
    ctx.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, step=number, overlap=True)
"""


def run_script(tmp_path, late, then=""):
    environ = {
        "ORCH_JOB_ID": "j",
        "ORCH_ATTEMPT": "1",
        "ORCH_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "ORCH_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
    }
    text = SCRIPT.format(late=late) + textwrap.dedent(then)
    return warm.run(text, env=environ)


def test_a_script_that_ends_after_a_save_leaves_it_whole(tmp_path):
    done = run_script(tmp_path, "at once")
    assert done.returncode == 0, done.stderr
    assert newest(tmp_path).step == 2


def test_a_save_by_an_exit_handler_is_whole(tmp_path):
    then = """
        import atexit
        step()
        atexit.register(lambda: ctx.save({"model": model.state_dict()}, step=3, overlap=True))
        """
    done = run_script(tmp_path, "at once", then)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = newest(tmp_path)
    assert loaded.step == 3
    assert loaded.state["model"]["weight"].shape == (1024, 1024)


def test_a_process_that_is_killed_before_the_rest_is_copied_leaves_the_one_before(tmp_path):
    done = run_script(tmp_path, "never", "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert newest(tmp_path).step == 1


def test_a_forked_child_trains_on_and_waits_for_no_thread_of_its_parent(tmp_path):
    fork = """
        child = os.fork()
        if child == 0:
            optimizer.step()
            os._exit(7)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    done = run_script(tmp_path, "never", fork)
    assert done.returncode == 7, done.stderr


def test_a_warning_that_is_an_error_ends_no_training(saver, page):
    gate = Gate()
    one = saver(gate)
    training = begun(one)
    save(one, training, 2)
    add_one(training.model[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.open()
    training.step()
    assert page.read().checkpoint.failed_saves == 1

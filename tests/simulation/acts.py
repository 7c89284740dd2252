"""The acts of a history and their weights. Each act draws its choices from its step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.api.protocol import Verb
from orchestrator.runtime.memory import faults as f
from tests.simulation import failures, progress, users

if TYPE_CHECKING:
    from tests.simulation.world import Do


@dataclass(frozen=True, slots=True)
class Act:
    """``weight`` is its frequency relative to the other acts; ``fault`` acts are counted as faults."""

    do: Do
    weight: float
    fault: bool = False


ACTS: dict[str, Act] = {
    "submit": Act(users.submit, 8),
    "cancel": Act(users.stop(Verb.CANCEL), 1.5),
    "cancel by force": Act(users.force, 1.5),
    "pause": Act(users.stop(Verb.PAUSE), 1.5),
    "resume": Act(users.resume, 2),
    "reprioritise": Act(users.reprioritise, 0.5),
    "preempt": Act(users.preempt, 1.0),
    "round": Act(progress.round_, 6),
    "things happen": Act(progress.things_happen, 10),
    "time passes": Act(progress.time_passes, 4),
    "all goes on": Act(progress.all_goes_on, 12),
    "deliver": Act(progress.deliver, 4),
    "wake up": Act(progress.wake_up, 4),
    "look": Act(progress.look, 2),
    "deliver again": Act(progress.deliver_again, 1, fault=True),
    "restart": Act(progress.restart, 1, fault=True),
    "crash before a write": Act(progress.crash_before_a_write, 1, fault=True),
    "crash after a write": Act(progress.crash_after_a_write, 1, fault=True),
    "hang is found": Act(progress.hang_is_found, 0.5, fault=True),
    "rank ends": Act(failures.rank_ends, 5, fault=True),
    "all ranks end": Act(failures.all_ranks_end, 2, fault=True),
    "rank hangs": Act(failures.rank_hangs, 1, fault=True),
    "stop from outside": Act(failures.stop_from_outside, 2, fault=True),
    "actor dies": Act(failures.actor_dies, 2, fault=True),
    "node dies": Act(failures.node_dies, 1, fault=True),
    "node returns": Act(failures.node_returns, 3),
    "node is silent": Act(failures.node_silent, 1, fault=True),
    "node answers": Act(failures.node_answers, 2),
    "head is lost": Act(failures.head_lost, 0.3, fault=True),
    "replies are lost": Act(failures.replies(f.ReplyLost), 1.5, fault=True),
    "replies are repeated": Act(failures.replies(f.ReplyRepeated), 1.5, fault=True),
    "slow node": Act(failures.slow, 1, fault=True),
    "GPU drops out": Act(failures.gpu_lost, 0.3, fault=True),
    "GPU returns": Act(failures.gpu_returns, 1),
    "disk is full": Act(failures.disk_full, 1, fault=True),
    "disk is freed": Act(failures.disk_freed, 2),
    "checkpoint": Act(failures.checkpoint, 5),
    "checkpoint is torn": Act(failures.checkpoint_broken, 1, fault=True),
    "clock steps": Act(failures.clock_steps, 1.5, fault=True),
    "clock skew": Act(failures.clock_skew, 1, fault=True),
    "machine boots": Act(failures.machine_boots, 0.5, fault=True),
    "hostile fact": Act(failures.hostile_fact, 3, fault=True),
}

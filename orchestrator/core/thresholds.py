"""Every threshold of the diagnosis, in one place: windows, and the limits above or below which a figure counts."""

from __future__ import annotations

from typing import Final

WINDOW_SECONDS: Final = 30.0
"""GPUs' figures are means and medians over this time."""
LEAST_SAMPLES: Final = 8
"""A window with fewer samples gives no figure."""
RANK_WINDOW_SECONDS: Final = 40.0
LONG_WINDOW_SECONDS: Final = 120.0
"""A rank's times are means over both windows: the long one shows what noise hides in the short one."""
LEAST_STEPS: Final = 5
"""A mean covers at least this many moments with new steps, however long they take."""
CERTAIN_DEVIATIONS: Final = 4.5
"""A rank or a node that is slower by less than this many standard errors may be so by chance: its figure counts for less."""
BUSY_UTILIZATION: Final = 0.4
"""GPUs are compared while the job's typical one is busy for this share of the time."""
SPINNING_UTILIZATION: Final = 0.8
"""GPUs that wait in a collective are busy for at least this share of the time."""
IDLE_UTILIZATION: Final = 0.02
BALANCE_SECONDS: Final = 60.0
"""A job's balance compares its GPUs' averages over this time."""
SETTLED_SECONDS: Final = 10.0
"""A job that has run for less than this has no balance: its ranks do not all start at once."""
UNUSED_UTILIZATION: Final = 0.05
"""GPUs whose mean utilization is at most this have no coefficient of variation (CV): a few percent of nothing differ by chance."""
BALANCE_BANDS: Final = (0.05, 0.10, 0.20)
"""The bands of a CV end here: excellent, good, fair. Above them the load is uneven: poor."""
LOCKSTEP: Final = 1.1
"""Ranks with steps that take the same time to within this factor meet in a collective at every step."""
LEAST_STEP_SHARE: Final = 0.05
"""The extra time of a rank must be this share of a step: less has no effect."""
LOWER_LIMIT: Final = 0.95
"""A power cap counts where the GPU's limit or clock is below this share of its neighbours'."""
STILL_SECONDS: Final = 30.0
STILL_STEPS: Final = 10.0
STILL_PAUSES: Final = 3.0
"""Limits on stillness with idle ranks: seconds, multiples of the longest step, of the longest pause in the phase."""
WORKING_FACTOR: Final = 10.0
"""Factor on those limits for a job in which a rank works."""
WORLD_SIZE_SECONDS: Final = 10.0
RENDEZVOUS_SECONDS: Final = 30.0
"""Longest waits of ranks for a process group: for one of a wrong size, and for one that lacks an idle rank."""
FLAT_FACTOR: Final = 5.0
"""A loss is flat after this many times the longest interval between its changes."""
FLAT_STEPS: Final = 10
NEVER_CHANGED_STEPS: Final = 1000
"""A loss that has never changed may be reported once per epoch: it needs this many steps, and ten minutes."""
NEVER_CHANGED_SECONDS: Final = 600.0
UNSAVED_SECONDS: Final = 1800.0
"""A job that saves is reported after three of its intervals, and not before this."""
SAVES_MISSED: Final = 3.0
NEVER_SAVED_SECONDS: Final = 7200.0
BEHIND_SHARE: Final = 0.9
"""An attempt below this share of its checkpoint's step has not loaded it. Steps of reports and of names of files differ by some."""
LEAST_STALL_SECONDS: Final = 1.0
"""A save that stalls training for less is no problem, however often it occurs."""
GROWTH_SLOTS: Final = 10
"""Memory grows steadily when it has grown through this many minutes."""
GROWTH_SLOT_SECONDS: Final = 60.0
GROWING_SHARE: Final = 0.8
"""It grew in at least this share of them, and shrank in none."""
FAST_SLOTS: Final = 6
FAST_SLOT_SECONDS: Final = 10.0
FAST_HORIZON_SECONDS: Final = 600.0
FAST_USED: Final = 0.4
"""Host memory that would be full within ten minutes is reported after one, where it is already filled to this share."""
PROCESS_WINDOW_SECONDS: Final = 60.0
LEAST_LOOKS: Final = 30
"""Minimum number of looks at a rank's training thread from which a share is computed."""
LEAST_BUSY: Final = 0.02
"""A rank that uses less of a processor is idle, and does not wait for its input."""
LOCKED_MORE: Final = 0.1
"""Waiting ranks wait in a lock for this share of the time more than the rank that they wait for."""
STEADY_GROWTH: Final = 0.7
"""The later half of the growth is at least this share of the earlier half: a filling cache grows ever more slowly."""
GROWTH_HORIZON_SECONDS: Final = 6 * 3600.0
"""Memory that would be full only later is not reported."""
EXPORTER_SECONDS: Final = 30.0
"""An exporter that has not answered for this long is stopped or hangs; on a machine with a load of 50 on each processor one may take 20 s."""
STARTING: Final = 0.5
"""An exporter that starts is no evidence: the finding neither opens nor closes."""
FOREIGN_BYTES: Final = 2.0 * 2**30
FOREIGN_SHARE: Final = 0.05
"""Memory that no process accounts for: drivers and contexts take up to this, or this share of the GPU's memory."""
COUNTED_SECONDS: Final = 600.0
"""Memory errors that are corrected are counted over this time."""
CORRECTED: Final = 60.0
"""This many corrected errors in that time, one every ten seconds, show a failing cell; single ones are cosmic rays."""
LOSS_WINDOW: Final = 300
"""A loss is compared with this many of its newest values, ten minutes of them."""
LEAST_LOSSES: Final = 40
JUMPED_VALUES: Final = 6
"""This many values in a row represent the present loss: single batches do not."""
JUMPED_DEVIATIONS: Final = 6.0
JUMPED_FACTOR: Final = 0.5
"""A jump is at least this share of the usual loss, and at least ``JUMPED_DEVIATIONS`` robust standard deviations."""
JUMP_ENDS_AFTER: Final = 300
"""A loss that stays at the level of its jump for this many values has that level as its usual value."""
STORAGE_FULL: Final = frozenset({"ENOSPC", "EDQUOT"})
LEAST_WRITE_SECONDS: Final = 20.0
USUAL_WRITES: Final = 5.0
"""A write takes too long after this many times the attempt's usual time, and at least ``LEAST_WRITE_SECONDS``."""
FIRST_WRITE_SECONDS: Final = 600.0
"""The first writes, for which no usual time is known, may take this long."""
WAITING_SHARE: Final = 0.1
WAITING_SECONDS: Final = 120.0
"""Saves that wait for storage for ``WAITING_SHARE`` of the newest ``WAITING_SECONDS`` make training slower."""
LATE_SECONDS: Final = 0.5
"""A daemon is overloaded if its loop is late by more than this."""
LATE_LOOKS: Final = 8
"""The daemon's lateness is the median of this many looks, so that one pause of the machine does not count."""
AGAIN_FACTOR: Final = 2.0
"""After each close a finding takes this many times as long to open again, at most ``LONGEST_AGAIN_SECONDS``."""
LONGEST_AGAIN_SECONDS: Final = 1800.0
MAX_FINDINGS: Final = 16
"""Maximum number of findings that one job has open at a time; of new ones, the most severe open."""

"""The bytes that `fake_nvml.c` answers from, as ctypes structures over a memory-mapped file."""

from __future__ import annotations

import ctypes

MAX_GPUS, MAX_MIG, MAX_FIELDS, MAX_PROCESSES, MAX_EVENTS, MAX_SAMPLES = 16, 7, 96, 64, 32, 256
MAGIC = 0x4C4D564E

CALLS = (
    "handle",
    "utilization",
    "memory",
    "temperature",
    "power",
    "limit",
    "clock",
    "fan",
    "energy",
    "fields",
    "reasons",
    "processes",
    "samples",
    "pcie_throughput",
    "other",
)
"""Kinds of calls that have a latency, an error and a count of their own."""


class Field(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("result", ctypes.c_int32),
        ("type", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
        ("timestamp_us", ctypes.c_int64),
        ("latency_us", ctypes.c_int64),
        ("period_us", ctypes.c_int64),
        ("wobble", ctypes.c_uint64),
    )


class Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("memory", ctypes.c_uint64))


class Event(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint64), ("data", ctypes.c_uint64))


class PowerSample(ctypes.Structure):
    _fields_ = (("timestamp_us", ctypes.c_uint64), ("value", ctypes.c_uint64))


class Mig(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("memory_total", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),
    )


class Gpu(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("domain", ctypes.c_uint32),
        ("bus", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("hang", ctypes.c_uint32),
        ("utilization", ctypes.c_uint32),
        ("memory_utilization", ctypes.c_uint32),
        ("memory_total", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),
        ("memory_reserved", ctypes.c_uint64),
        ("power_mw", ctypes.c_uint32),
        ("limit_mw", ctypes.c_uint32),
        ("temperature", ctypes.c_int32),
        ("fan", ctypes.c_uint32),
        ("clocks_mhz", ctypes.c_uint32 * 4),
        ("thresholds", ctypes.c_uint32 * 4),
        ("energy_mj", ctypes.c_uint64),
        ("energy_since_us", ctypes.c_uint64),
        ("reasons", ctypes.c_uint64),
        ("supported_reasons", ctypes.c_uint64),
        ("mig_mode", ctypes.c_uint32),
        ("mig_count", ctypes.c_uint32),
        ("mig", Mig * MAX_MIG),
        ("field_count", ctypes.c_uint32),
        ("process_count", ctypes.c_uint32),
        ("sample_count", ctypes.c_uint32),
        ("event_count", ctypes.c_uint32),
        ("fields", Field * MAX_FIELDS),
        ("processes", Process * MAX_PROCESSES),
        ("samples", PowerSample * MAX_SAMPLES),
        ("events", Event * MAX_EVENTS),
        ("errors", ctypes.c_int32 * len(CALLS)),
        ("error", ctypes.c_int32),
        ("pad", ctypes.c_uint32),
        ("latency_us", ctypes.c_uint32 * len(CALLS)),
        ("spin_us", ctypes.c_uint32 * len(CALLS)),
        ("calls", ctypes.c_uint64 * len(CALLS)),
    )


class State(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("init_result", ctypes.c_int32),
        ("pad", ctypes.c_uint32),
        ("driver_version", ctypes.c_char * 96),
        ("gpus", Gpu * MAX_GPUS),
    )

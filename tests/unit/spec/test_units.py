"""Durations and memory: accepted texts, refused texts, and that writing and reading are inverse."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.problems import BadValueError
from orchestrator.spec.units import MAX_DURATION, format_duration, format_memory, parse_duration, parse_memory


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("90s", 90),
        ("500ms", 0.5),
        ("1m500ms", 60.5),
        ("2d", 172_800),
        ("1w", 604_800),
        ("0s", 0),
        ("1.5s", 1.5),
        ("0.5h", 1800),
        ("3650d", 315_360_000),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "write 10m"),
        ("90", "write 90s, 90m or 90h"),
        ("0", "write 0s"),
        ("1.5", "write 1.5s"),
        ("h", "write 10m"),
        ("5 m", "write 10m"),
        ("1e3", "write 10m"),
        ("30m1h", "write 10m"),
        ("1h1h", "write 10m"),
        ("5m\n", "write 10m"),
        ("-5s", "a duration is not negative"),
        ("24:00:00", "write 24h"),
        ("1-12:00:00", "write 1d12h"),
        ("1:30", "write 1m30s"),
        ("0:00", "write 0s"),
        ("3651d", "leave the key out for no limit"),
        ("9" * 5000 + ":00", "write 10m"),
        ("9" * 5000, "write 10m"),
    ],
)
def test_other_durations_are_refused_with_advice(text: str, hint: str) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_duration(text)
    assert hint in caught.value.hint
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.25, "250ms"), (1.5, "1.5s"), (90, "1m30s"), (60.25, "1m250ms"), (86_400, "1d"), (5400, "1h30m")],
)
def test_durations_are_written_as_people_do(seconds: float, text: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == text


@given(st.timedeltas(min_value=timedelta(0), max_value=MAX_DURATION))
def test_every_duration_reads_back_to_the_microsecond(duration: timedelta) -> None:
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8GB", 8_000_000_000),
        ("8G", 8_000_000_000),
        ("8 gb", 8_000_000_000),
        ("8GiB", 8_589_934_592),
        ("8Gi", 8_589_934_592),
        ("512KiB", 524_288),
        ("1.5TB", 1_500_000_000_000),
        ("2PiB", 2 * 1024**5),
        ("3MB", 3_000_000),
        ("1024", 1024),
        ("1000000000000000", 10**15),
        ("7B", 7),
    ],
)
def test_memory_is_read_with_decimal_and_binary_units(text: str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "8iB", "8EB", "-1GB", "8GBs", "1e9", "2000PB", "9" * 5000])
def test_other_memory_is_refused_with_advice(text: str) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_memory(text)
    assert "8GiB" in caught.value.hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8_000_000_000, "8GB"),
        (8 * 2**30, "8GiB"),
        (1_500_000_000, "1.5GB"),
        (512 * 2**20, "512MiB"),
        (0, "0B"),
        (1023, "1023B"),
        (123_456_789_123, "123456789123B"),
        (10**18, "1000PB"),
    ],
)
def test_memory_is_written_as_it_is_read(count: int, text: str) -> None:
    assert format_memory(count) == text
    assert parse_memory(text) == count

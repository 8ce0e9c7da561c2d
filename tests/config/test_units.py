"""Numbers with units: what is read, what is refused, and that what is written reads back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.reading.units import UnreadableNumber, format_number, parse_number


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("200ms", "s", 0.2),
        ("5s", "s", 5),
        ("2m", "s", 120),
        ("1h", "s", 3600),
        ("1d", "s", 86400),
        ("1.5", "s", 1.5),
        ("250us", "s", 0.00025),
        ("0.2s", "ms", 200),
        ("3ms", "ms", 3),
        ("8k", "tokens", 8000),
        ("8Ki", "tokens", 8192),
        ("1M", "blocks", 1_000_000),
        ("1_000", "count", 1000),
        ("64GiB", "bytes", 64 * 2**30),
        ("64 GB", "bytes", 64 * 10**9),
        ("7B", "bytes", 7),
        ("16Ti", "bytes", 16 * 2**40),
        ("10GiB/s", "bytes/s", 10 * 2**30),
        ("80%", "ratio", 0.8),
        ("0.8", "ratio", 0.8),
        ("10/s", "1/s", 10),
        ("600/min", "1/s", 10),
        ("20k/s", "1/s", 20_000),
        ("1e3", None, 1000),
        ("-2.5", None, -2.5),
    ],
)
def test_text_becomes_the_number_in_the_base_unit(text, unit, value):
    assert parse_number(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        *(("", "s"), ("five", "s"), ("5 lightyears", "s"), ("8k", "s"), ("5s", "bytes"), ("80%", "tokens")),
        *(("8k", None), ("1e999", None), ("nan", None), ("inf", "s"), ("1..2", None), ("--1", None), ("5/s", "tokens")),
    ],
)
def test_text_that_is_no_number_of_the_unit_is_refused(text, unit):
    with pytest.raises(UnreadableNumber):
        parse_number(text, unit)


def test_a_refused_unit_says_which_ones_there_are():
    with pytest.raises(UnreadableNumber, match="200ms"):
        parse_number("5 lightyears", "s")


def test_whole_numbers_stay_exact_beyond_what_a_float_holds():
    assert parse_number("9007199254740993", "bytes") == 9007199254740993
    assert parse_number("8388608Ti", "bytes") == 8388608 * 2**40


UNITS = [None, "s", "ms", "bytes", "tokens", "blocks", "requests", "ratio", "count", "1/s", "bytes/s"]


@given(st.integers(0, 2**60), st.sampled_from(UNITS))
def test_a_written_whole_number_reads_back(value, unit):
    assert parse_number(format_number(value, unit), unit) == value


@given(st.floats(0, 1e12, allow_nan=False), st.sampled_from(UNITS))
def test_a_written_number_reads_back(value, unit):
    assert parse_number(format_number(value, unit), unit) == value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.2, "s", "200ms"), (600.0, "s", "10m"), (5.0, "s", "5s"), (32 * 2**20, "bytes", "32MiB"), (0.5, "ratio", "0.5")],
)
def test_numbers_are_written_with_the_unit_that_reads_best(value, unit, text):
    assert format_number(value, unit) == text

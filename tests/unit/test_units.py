from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.units import (
    GIB,
    QuantityError,
    parse_bytes,
    parse_bytes_per_s,
    parse_count,
    parse_flops,
    parse_flops_per_s,
    parse_seconds,
    show_bytes,
    show_bytes_per_s,
    show_count,
    show_flops,
    show_flops_per_s,
    show_seconds,
    show_usd,
    show_wire,
)

PARSERS = (parse_bytes, parse_bytes_per_s, parse_count, parse_flops, parse_flops_per_s, parse_seconds)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (80 * 2**30, "80 GiB"),
        (80 * 2**30, "80GiB"),
        (80_000_000_000, " 80 GB "),
        (1_500, "1.5 kB"),
        (1_536, "1.5 KiB"),
        (4_096, "4096"),
        (1_000_000, "1_000_000 B"),
        (1_181_116_006, "1.1 GiB"),  # 1181116006.4, rounded to a whole byte
        (2_000_000_000, "2e9 B"),
    ],
)
def test_bytes_are_read_by_their_prefix(expected, text):
    """A prefix with i is a power of 1024, one without a power of 1000."""
    assert expected == parse_bytes(text)


@pytest.mark.parametrize(
    ("expected", "text"),
    [(50e9, "400 Gb/s"), (50e9, "400 Gbps"), (900e9, "900 GB/s"), (900e9, "900GBps"), (3.35e12, "3.35 TB/s"), (2**30, "1 GiB/s")],
)
def test_a_small_b_is_a_bit(expected, text):
    """Eight of them make a byte; confusing the two is the commonest error in this field."""
    assert expected == parse_bytes_per_s(text)


@pytest.mark.parametrize(("expected", "text"), [(1e-5, "10 us"), (1e-5, "10 µs"), (5400, "1 h 30 min"), (5400, "1h30min"), (90, "90")])
def test_durations_add_up(expected, text):
    """Several parts are summed."""
    assert expected == parse_seconds(text)


@pytest.mark.parametrize(("expected", "text"), [(15 * 10**12, "15T"), (1_500_000_000, "1.5 B"), (100, "100"), (0, "0")])
def test_counts_are_thousands(expected, text):
    """Tokens and parameters are counted in k, M, B and T."""
    assert expected == parse_count(text)


def test_arithmetic_is_read_as_vendors_write_it():
    """FLOP is an amount; FLOP/s and FLOPS are rates."""
    assert parse_flops("2 PFLOP") == 2e15
    assert parse_flops_per_s("989 TFLOP/s") == parse_flops_per_s("989 TFLOPS") == 989e12


@pytest.mark.parametrize("text", ["80G", "80 M", "80g", "80 K"])
def test_a_bare_prefix_is_refused_with_both_readings(text):
    """80G may be GiB or GB, seven per cent apart."""
    with pytest.raises(QuantityError, match=r"ambiguous|unknown") as refused:
        parse_bytes(text)

    assert "1024" in refused.value.attempt
    assert "1000" in refused.value.attempt


def test_an_unclear_bandwidth_shows_bytes_and_bits():
    """400G may be bytes or bits, a factor of eight apart."""
    with pytest.raises(QuantityError, match="ambiguous") as refused:
        parse_bytes_per_s("400G")

    assert refused.value.attempt is not None
    assert '"400 GB/s"' in refused.value.attempt
    assert '"400 Gb/s"' in refused.value.attempt


def test_memory_is_never_counted_in_bits():
    """80 Gb of memory is a slip of the key."""
    with pytest.raises(QuantityError):
        parse_bytes("80 Gb")


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "wrong",
    [
        *("", "GiB", "many", "-5", "-5 GiB", "1e99", "1e999999999", "9" * 5000, "0x10", "1,5", "nan", "5 parsecs"),
        *(math.nan, math.inf, -math.inf, -1, -0.5, True, False, None, [80], {"GiB": 80}, 10**40, 1e40),
    ],
)
def test_nonsense_is_refused(parse, wrong):
    """Whatever a TOML file can hold, a reader gives a number or a QuantityError."""
    with pytest.raises(QuantityError) as refused:
        parse(wrong)

    assert refused.value.allowed
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("parse", [parse_bytes, parse_count])
@pytest.mark.parametrize("wrong", [0.5, 1.5, "0.5"])
def test_a_fraction_of_a_byte_or_token_is_refused(parse, wrong):
    """What is counted is whole."""
    with pytest.raises(QuantityError, match="whole"):
        parse(wrong)


@given(st.text(max_size=20))
def test_no_text_breaks_a_reader(text):
    """Every text is a finite quantity or a QuantityError."""
    for parse in PARSERS:
        try:
            value = parse(text)
        except QuantityError:
            continue
        assert math.isfinite(value)
        assert value >= 0


@given(st.integers(0, 2**60))
def test_a_number_of_bytes_is_read_exactly(amount_bytes):
    """No rounding through floating point."""
    assert amount_bytes == parse_bytes(amount_bytes) == parse_bytes(str(amount_bytes)) == parse_bytes(f"{amount_bytes} B")


@given(st.integers(1, 10**6))
def test_what_is_shown_can_be_read(num_gib):
    """show_bytes and parse_bytes are inverse, within the two decimals shown."""
    shown = show_bytes(num_gib * GIB)

    assert math.isclose(num_gib * GIB, parse_bytes(shown), rel_tol=0.005)


def test_memory_and_wire_are_shown_as_vendors_do():
    """Memory in powers of 1024, traffic and bandwidth in powers of 1000."""
    assert show_bytes(80 * GIB) == "80.00 GiB"
    assert show_bytes(0) == "0 B"
    assert show_wire(1_250_000_000) == "1.25 GB"
    assert show_bytes_per_s(50e9) == "50.00 GB/s"
    assert show_flops(8.5e18) == "8.50 EFLOP"
    assert show_flops_per_s(989e12) == "989.00 TFLOP/s"
    assert show_count(8_030_261_248) == "8.03B"
    assert show_usd(0.5) == "$0.50"


@pytest.mark.parametrize(
    ("expected", "duration_s"),
    [("0.00 s", 0), ("1.00 s", 1), ("1.50 ms", 1.5e-3), ("-1.50 ms", -1.5e-3), ("0.00 ns", 1e-15), ("2.00 min", 120), ("1.00 d", 86400)],
)
def test_durations_are_shown_in_the_unit_a_person_would_choose(expected, duration_s):
    """The number before the unit stays readable."""
    assert expected == show_seconds(duration_s)

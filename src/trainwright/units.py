"""Units: one alias for each kind of number, readers for what people write, writers for what people read.

Inside Trainwright a quantity is a plain number and its unit ends its name (`payload_bytes`, `hop_s`).
The aliases tell the reader, and a test, which unit a number has; they cost nothing at run time. Bytes and operations are
counted, so they are whole; an average or a bound of them may be a plain float.
Text such as "80 GiB" exists only at the edge: `parse_*` turns it into a number, `show_*` turns a number into text.
Memory is shown in GiB (2^30), wire and bandwidth in GB and GB/s (10^9), as vendors do.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Bytes: TypeAlias = int
Seconds: TypeAlias = float
Flops: TypeAlias = int
BytesPerSecond: TypeAlias = float
FlopsPerSecond: TypeAlias = float
Usd: TypeAlias = float

KIB: Bytes = 2**10
MIB: Bytes = 2**20
GIB: Bytes = 2**30
TIB: Bytes = 2**40

_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES: Mapping[str, int] = {"": 1, **_DECIMAL, **_BINARY}

_BYTE_UNITS = {f"{prefix}B": Fraction(factor) for prefix, factor in _PREFIXES.items()}
_BIT_UNITS = {f"{prefix}{bit}": Fraction(factor, 8) for prefix, factor in _PREFIXES.items() for bit in ("b", "bit")}
_RATE_UNITS = {
    f"{unit}{per}": factor
    for units, per in ((_BYTE_UNITS, "/s"), (_BIT_UNITS, "/s"), (_BYTE_UNITS, "ps"), (_BIT_UNITS, "ps"))
    for unit, factor in units.items()
}
_FLOP_UNITS = {f"{prefix}{flop}": Fraction(factor) for prefix, factor in {"": 1, **_DECIMAL}.items() for flop in ("FLOP", "FLOPs")}
_FLOP_RATE_UNITS = {f"{prefix}{flop}": Fraction(f) for prefix, f in {"": 1, **_DECIMAL}.items() for flop in ("FLOP/s", "FLOPS")}
_SECOND_UNITS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_COUNT_UNITS = {
    "": Fraction(1),
    "k": Fraction(10**3),
    "K": Fraction(10**3),
    "M": Fraction(10**6),
    "B": Fraction(10**9),
    "T": Fraction(10**12),
}

_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)\s*([^\s0-9]*)\s*")
_LONGEST_TEXT = 60
_LARGEST = 10**30


class QuantityError(ValueError):
    """A text that is no quantity of the kind asked for. Says what is allowed and what to try."""

    def __init__(self, message: str, *, given: object, allowed: str, attempt: str | None = None) -> None:
        """Keep the parts, so that the edge can make a Problem of them."""
        super().__init__(message)
        self.given = given
        self.allowed = allowed
        self.attempt = attempt


def parse_bytes(given: object) -> Bytes:
    """Read an amount of memory or payload; a bare number is in bytes.

    >>> parse_bytes("80 GiB"), parse_bytes("80 GB"), parse_bytes(4096)
    (85899345920, 80000000000, 4096)

    Raises QuantityError for "80G", which may mean either, and for bits.
    """
    allowed = 'a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as "80 GiB"'
    return _whole(_one(given, _BYTE_UNITS | {"": Fraction(1)}, "an amount of bytes", allowed, _suggest_bytes), given, allowed)


def parse_bytes_per_s(given: object) -> BytesPerSecond:
    """Read a bandwidth; a bare number is in bytes per second. A small b is a bit, eight to the byte.

    >>> parse_bytes_per_s("400 Gb/s"), parse_bytes_per_s("900 GB/s")
    (50000000000.0, 900000000000.0)
    """
    allowed = 'a number and one of B/s, MB/s, GB/s, TB/s, Mb/s, Gb/s, Tb/s, such as "900 GB/s" or "400 Gb/s"'
    return float(_one(given, _RATE_UNITS | {"": Fraction(1)}, "a bandwidth", allowed, _suggest_rate))


def parse_seconds(given: object) -> Seconds:
    """Read a duration, in one part or several; a bare number is in seconds.

    >>> parse_seconds("10 us"), parse_seconds("1 h 30 min"), parse_seconds(2)
    (1e-05, 5400.0, 2.0)
    """
    allowed = 'a number and one of ns, us, ms, s, min, h, d, such as "30 s" or "1 h 30 min"'
    return float(_several(given, _SECOND_UNITS, "a duration", allowed, _suggest_seconds))


def parse_flops(given: object) -> Flops:
    """Read an amount of arithmetic; a bare number is in floating-point operations.

    >>> parse_flops("3.8e25"), parse_flops("2 PFLOP")
    (38000000000000000000000000, 2000000000000000)
    """
    allowed = 'a number and one of FLOP, GFLOP, TFLOP, PFLOP, EFLOP, such as "2 PFLOP"'
    return _whole(_one(given, _FLOP_UNITS | {"": Fraction(1)}, "an amount of arithmetic", allowed, _no_suggestion), given, allowed)


def parse_flops_per_s(given: object) -> FlopsPerSecond:
    """Read a rate of arithmetic; a bare number is in floating-point operations per second.

    >>> parse_flops_per_s("989 TFLOP/s"), parse_flops_per_s("2.25 PFLOPS")
    (989000000000000.0, 2250000000000000.0)
    """
    allowed = 'a number and one of GFLOP/s, TFLOP/s, PFLOP/s, such as "989 TFLOP/s"'
    return float(_one(given, _FLOP_RATE_UNITS | {"": Fraction(1)}, "a rate of arithmetic", allowed, _no_suggestion))


def parse_count(given: object) -> int:
    """Read a count of tokens or parameters: k, M, B, T are powers of a thousand.

    >>> parse_count("15T"), parse_count("1.5 B"), parse_count(7)
    (15000000000000, 1500000000, 7)
    """
    allowed = 'a whole number, or one with k, M, B or T behind it, such as "15T"'
    return _whole(_one(given, _COUNT_UNITS, "a count", allowed, _no_suggestion), given, allowed)


def show_bytes(amount_bytes: float) -> str:
    """Write an amount of memory, in powers of 1024.

    >>> show_bytes(85899345920), show_bytes(1536), show_bytes(-(2**30))
    ('80.00 GiB', '1.50 KiB', '-1.00 GiB')
    """
    return _scaled(amount_bytes, (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)), "B")


def show_wire(amount_bytes: float) -> str:
    """Write an amount of traffic, in powers of 1000.

    >>> show_wire(80_000_000_000), show_wire(999)
    ('80.00 GB', '999 B')
    """
    return _scaled(amount_bytes, (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)), "B")


def show_bytes_per_s(rate_bytes_per_s: BytesPerSecond) -> str:
    """Write a bandwidth, in powers of 1000.

    >>> show_bytes_per_s(900e9)
    '900.00 GB/s'
    """
    return _scaled(rate_bytes_per_s, (("TB/s", 10**12), ("GB/s", 10**9), ("MB/s", 10**6), ("kB/s", 10**3)), "B/s")


def show_flops(amount_flops: float) -> str:
    """Write an amount of arithmetic.

    >>> show_flops(2.5e15)
    '2.50 PFLOP'
    """
    return _scaled(amount_flops, (("EFLOP", 10**18), ("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)), "FLOP")


def show_flops_per_s(rate_flops_per_s: FlopsPerSecond) -> str:
    """Write a rate of arithmetic.

    >>> show_flops_per_s(989e12)
    '989.00 TFLOP/s'
    """
    return f"{show_flops(rate_flops_per_s)}/s"


def show_seconds(duration_s: Seconds) -> str:
    """Write a duration in the unit a person would choose.

    >>> [show_seconds(t) for t in (2.5e-6, 0.0123, 4.5, 864.0, 5400.0, 9e6)]
    ['2.50 us', '12.30 ms', '4.50 s', '14.40 min', '1.50 h', '104.17 d']
    """
    if 0 < abs(duration_s) < 1:
        small = (("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
        unit, size = next(((unit, size) for unit, size in small if abs(duration_s) >= size), ("ns", 1e-9))
        return f"{duration_s / size:.2f} {unit}"
    large = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    unit, size = next(((unit, size) for unit, size in large if abs(duration_s) >= size), ("s", 1.0))
    return f"{duration_s / size:.2f} {unit}"


def show_count(count: float) -> str:
    """Write a count of tokens or parameters.

    >>> show_count(15e12), show_count(8_030_261_248), show_count(512)
    ('15.00T', '8.03B', '512')
    """
    return _scaled(count, (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)), "").replace(" ", "")


def show_usd(amount_usd: Usd) -> str:
    """Write an amount of money.

    >>> show_usd(1234567.8), show_usd(0.25)
    ('$1,234,568', '$0.25')
    """
    return f"${amount_usd:,.2f}" if abs(amount_usd) < 100 else f"${amount_usd:,.0f}"  # below this, cents matter


def _scaled(value: float, scales: tuple[tuple[str, int], ...], base: str) -> str:
    for unit, size in scales:
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    number = f"{value:.0f}" if value == int(value) else f"{value:.2f}"
    return f"{number} {base}".rstrip()


def _one(given: object, units: Mapping[str, Fraction], kind: str, allowed: str, suggest: Callable[[str, str], str | None]) -> Fraction:
    """Read exactly one number with one unit."""
    if not isinstance(given, str):
        return _bare(given, kind, allowed)
    match = _NUMBER.fullmatch(given) if len(given) <= _LONGEST_TEXT else None
    if match is None:
        raise _unreadable(given, kind, allowed)
    return _amount(match, given, units, kind, allowed, suggest)


def _several(given: object, units: Mapping[str, Fraction], kind: str, allowed: str, suggest: Callable[[str, str], str | None]) -> Fraction:
    """Read the sum of one or more numbers with units, or one bare number."""
    if not isinstance(given, str):
        return _bare(given, kind, allowed)
    if len(given) > _LONGEST_TEXT:
        raise _unreadable(given, kind, allowed)
    parts = list(_NUMBER.finditer(given))
    if not parts or "".join(part.group(0) for part in parts) != given:
        raise _unreadable(given, kind, allowed)
    known = {**units, "": Fraction(1)} if len(parts) == 1 else units
    return sum((_amount(part, given, known, kind, allowed, suggest) for part in parts), Fraction(0))


def _amount(
    match: re.Match[str], given: str, units: Mapping[str, Fraction], kind: str, allowed: str, suggest: Callable[[str, str], str | None]
) -> Fraction:
    number, unit = match.groups()
    if unit not in units:
        raise QuantityError(_doubt(given, unit, kind), given=given, allowed=allowed, attempt=suggest(number, unit))
    value = Fraction(Decimal(number.replace("_", ""))) * units[unit]
    if value > _LARGEST:
        raise QuantityError(f'"{given}" is too large for {kind}', given=given, allowed=f"{allowed}, at most 1e30")
    return value


def _bare(given: object, kind: str, allowed: str) -> Fraction:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise _unreadable(given, kind, allowed)
    if isinstance(given, float) and not math.isfinite(given):
        raise QuantityError(f"{given} is not a finite number", given=given, allowed=allowed)
    if given < 0:
        raise QuantityError(f"{given} is negative, and {kind} cannot be", given=given, allowed=allowed)
    if given > _LARGEST:
        raise QuantityError(f"{Decimal(given):.3g} is too large for {kind}", given=given, allowed=f"{allowed}, at most 1e30")
    return Fraction(given)


def _whole(value: Fraction, given: object, allowed: str) -> int:
    """Round an amount written with a unit; refuse a fraction of the thing counted itself."""
    if value.denominator != 1 and (value < 1 or not isinstance(given, str)):
        raise QuantityError(f"{given} is not a whole number", given=given, allowed=allowed)
    return round(value)


def _unreadable(given: object, kind: str, allowed: str) -> QuantityError:
    text = repr(given) if not isinstance(given, str) else f'"{given[:_LONGEST_TEXT]}"'
    return QuantityError(f"{text} is not {kind}", given=given, allowed=allowed)


def _doubt(given: str, unit: str, kind: str) -> str:
    if unit == "":
        return f'"{given}" has no unit'
    if unit in _PREFIXES or unit in {"K", "m"}:
        return f'"{given}" is ambiguous: "{unit}" does not say what is counted'
    return f'"{given}" is not {kind}: unknown unit "{unit}"'


def _suggest_bytes(number: str, unit: str) -> str | None:
    letter = unit[:1].upper()
    if letter not in {"K", "M", "G", "T", "P"}:
        return None
    decimal = "k" if letter == "K" else letter
    return f'"{number} {letter}iB" (powers of 1024, as memory is counted) or "{number} {decimal}B" (powers of 1000, as vendors count)'


def _suggest_rate(number: str, unit: str) -> str | None:
    letter = unit[:1].upper()
    if letter not in {"K", "M", "G", "T", "P"}:
        return None
    letter = "k" if letter == "K" else letter
    return f'"{number} {letter}B/s" (bytes, as memory and NVLink are given) or "{number} {letter}b/s" (bits, as network cards are given)'


def _suggest_seconds(number: str, unit: str) -> str | None:
    return {"m": f'"{number} min" or "{number} ms"', "M": f'"{number} min"', "sec": f'"{number} s"', "hours": f'"{number} h"'}.get(unit)


def _no_suggestion(number: str, unit: str) -> None:  # noqa: ARG001 - the shape of a suggestion
    return None

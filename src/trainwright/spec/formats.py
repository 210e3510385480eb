"""Number formats: how many bytes one value takes.

>>> bytes_of("bf16")
2
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trainwright.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A floating-point format.

    bits are those stored; the leading one of the mantissa is not.
    landed: the engine can compute in it. The others occur in device tables only.
    """

    name: str
    num_bytes: Bytes
    exponent_bits: int
    mantissa_bits: int
    landed: bool


_ALL: Final = (
    Format(name="fp64", num_bytes=8, exponent_bits=11, mantissa_bits=52, landed=True),
    Format(name="fp32", num_bytes=4, exponent_bits=8, mantissa_bits=23, landed=True),
    Format(name="bf16", num_bytes=2, exponent_bits=8, mantissa_bits=7, landed=True),
    Format(name="tf32", num_bytes=4, exponent_bits=8, mantissa_bits=10, landed=False),
    Format(name="fp16", num_bytes=2, exponent_bits=5, mantissa_bits=10, landed=False),
    Format(name="fp8", num_bytes=1, exponent_bits=4, mantissa_bits=3, landed=False),
)

FORMATS: Final = MappingProxyType({fmt.name: fmt for fmt in _ALL})
LANDED: Final = tuple(fmt.name for fmt in _ALL if fmt.landed)


def bytes_of(name: str) -> int:
    """Bytes of one value of the named format; "none" takes none (a copy that does not exist).

    Raises KeyError for a name that is no format: a plan's formats are checked before they come here.
    """
    return 0 if name == "none" else FORMATS[name].num_bytes

"""Context: one sequence is divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

NAME: Final = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Options of `context`."""

    PLACE: ClassVar[int] = 4

    size: int = 1
    method: str = "ring"

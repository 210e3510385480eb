"""Expert: the experts of a mixture are divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

NAME: Final = "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """Options of `expert`."""

    PLACE: ClassVar[int] = 5

    size: int = 1
    tensor: bool = False

"""metrics.jsonl: one line of JSON a step, and one for each look at the validation text."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Self


class Metrics:
    """Appends lines to a file; with None for a path it writes nothing, as ranks other than the first do."""

    def __init__(self, path: Path | None) -> None:
        """Open the file."""
        self._file: IO[str] | None = None if path is None else path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        """The metrics themselves."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def write(self, **facts: float) -> None:
        """Add one line, and hand it to the system at once: a run that is killed keeps what it said."""
        if self._file is not None:
            self._file.write(json.dumps({name: _finite(value) for name, value in facts.items()}) + "\n")
            self._file.flush()


def _finite(value: float) -> float | str:
    """JSON has no word for infinity and what is not a number."""
    return value if value - value == 0 else str(value)

"""A progress bar on stderr, where stderr is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

_REDRAWN_S = 0.2


class Progress:
    """Shows how far a run has come.

    `shown` is False on all ranks but the first. Without a terminal nothing is printed, and rich is not loaded.
    """

    def __init__(self, num_steps: int, first_step: int = 0, *, shown: bool = True) -> None:
        """Be ready to show steps `first_step` to `num_steps`."""
        self.num_steps, self.first_step = num_steps, first_step
        self.shown = shown and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._drawn_s = 0.0

    def __enter__(self) -> Self:
        """Begin to show."""
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
            self._task = self._bar.add_task("begins", total=self.num_steps, completed=self.first_step)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, num_done: int, text: str) -> None:
        """So many steps are done."""
        if self._bar is None or (time.monotonic() - self._drawn_s < _REDRAWN_S and num_done < self.num_steps):
            return
        self._drawn_s = time.monotonic()
        self._bar.update(self._task, completed=num_done, description=text, refresh=True)

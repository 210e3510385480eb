"""Where virtual stages live: the maps from stage to pipeline position that schedules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator


def one_stage_a_position(stage: int, num_positions: int, chunks: int = 1) -> int:
    """Stage s lives on position s."""
    assert 0 <= stage < num_positions
    assert chunks == 1
    return stage


def looped(stage: int, num_positions: int, chunks: int) -> int:
    """Stage s lives on position s mod P: the model goes around the positions `chunks` times.

    >>> [looped(stage, num_positions=2, chunks=3) for stage in range(6)]
    [0, 1, 0, 1, 0, 1]
    """
    assert 0 <= stage < num_positions * chunks
    return stage % num_positions


def one_chunk_only(name: str, chunks: int) -> Iterator[Problem]:
    """Refuse chunks under a schedule that places one stage on a position."""
    if chunks != 1:
        yield Problem(
            f'the schedule "{name}" puts one stage on each position, not {chunks}',
            given=f"chunks = {chunks}",
            allowed="chunks = 1",
            attempt='chunks = 1, or the schedule "interleaved"',
        )

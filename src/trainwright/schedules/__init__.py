"""Pipeline schedules, one file each: the order in which every position visits its microbatches.

A schedule is a module with
    NAME            its public name
    DEFAULT_CHUNKS  virtual stages on one position where the user names none
    USES_CHUNKS     whether it can place more than one virtual stage on a position
    check(num_positions, num_microbatches, chunks)            yields Problems
    position_of(stage, num_positions, chunks)                 where a virtual stage lives
    order(position, num_positions, num_microbatches, chunks)  yields the Slots of one position, first to last
`timeline.py` walks any of them on a clock.
"""

from __future__ import annotations

from trainwright.registry import Registry

SCHEDULES = Registry("trainwright.schedules", "schedule")

"""Start times of a static schedule: the longest path through a graph of tasks, level by level in numpy.

Glossary
    node          one task, 0 … num_nodes - 1
    predecessors  tasks that must have ended before a task may start, as compressed rows: those of node i are
                  predecessors[offsets[i]:offsets[i + 1]]
    lag           extra wait on one edge, between the end of the predecessor and the start of the task
    level         largest number of edges on any way into a node; tasks of one level do not depend on each other

Levels depend on the edges only, so a graph that is priced many times is levelled once (`level`) and walked often
(`start_times`). `longest_path` does both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Indices: TypeAlias = NDArray[np.int64]
Times: TypeAlias = NDArray[Any]  # int64 where all durations are whole, else float64


class Cycle(Exception):  # noqa: N818 - the thing found
    """The tasks wait for each other in a circle. `nodes` lists one such circle: each waits for the next, the last for the first.

    `waiting` lists every task that can never start, those behind the circle too.
    """

    def __init__(self, nodes: tuple[int, ...], waiting: tuple[int, ...]) -> None:
        super().__init__(f"{len(waiting)} tasks can never start; these wait for each other: {' -> '.join(map(str, nodes))}")
        self.nodes = nodes
        self.waiting = waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A graph sorted by level. Arrays are in sorted order; `nodes` leads back to the caller's numbers."""

    nodes: Indices  # [num_nodes] caller's number of each sorted node
    edges: Indices  # [num_edges] caller's number of each sorted edge
    predecessors: Indices  # [num_edges] sorted number of each edge's predecessor
    offsets: Indices  # [num_nodes + 1] rows of `predecessors`
    bounds: Indices  # [num_levels + 1] first sorted node of each level


def longest_path(num_nodes: int, offsets: ArrayLike, predecessors: ArrayLike, lags: ArrayLike, durations: ArrayLike) -> Times:
    """Earliest start of every node: the maximum over its predecessors of their end plus the edge's lag; 0 without predecessors.

    Raises Cycle. Times are exact where durations and lags are integers.

    >>> longest_path(3, [0, 0, 1, 3], [0, 0, 1], [0, 5, 1], [2, 3, 1]).tolist()
    [0, 2, 7]
    """
    return start_times(level(num_nodes, offsets, predecessors), lags, durations)


def level(num_nodes: int, offsets: ArrayLike, predecessors: ArrayLike) -> Levels:
    """Sorts the nodes by level, within a level by number. Raises Cycle."""
    row_offsets = np.asarray(offsets, dtype=np.int64)
    sources = np.asarray(predecessors, dtype=np.int64)
    num_predecessors = np.diff(row_offsets)
    targets = np.repeat(np.arange(num_nodes, dtype=np.int64), num_predecessors)
    by_source = np.argsort(sources, kind="stable")
    successors = targets[by_source]
    num_successors = np.bincount(sources, minlength=num_nodes)
    successor_offsets = _offsets(num_successors)

    num_missing = num_predecessors.copy()
    depth_of = np.zeros(num_nodes, dtype=np.int64)
    mark = np.empty(num_nodes, dtype=np.int64)
    frontier = np.flatnonzero(num_missing == 0)
    sizes: list[int] = []
    while frontier.size:
        depth_of[frontier] = len(sizes)
        sizes.append(frontier.size)
        reached = successors[_row_entries(successor_offsets[frontier], num_successors[frontier])]
        np.subtract.at(num_missing, reached, 1)
        ready = reached[num_missing[reached] == 0]
        place = np.arange(ready.size)
        mark[ready] = place
        frontier = ready[mark[ready] == place]  # a node reached twice counts once
    if sum(sizes) < num_nodes:
        raise _cycle(row_offsets, sources, num_missing)

    nodes = np.argsort(depth_of, kind="stable")
    sorted_number = np.empty(num_nodes, dtype=np.int64)
    sorted_number[nodes] = np.arange(num_nodes)
    edges = _row_entries(row_offsets[nodes], num_predecessors[nodes])
    return Levels(
        nodes=nodes,
        edges=edges,
        predecessors=sorted_number[sources[edges]],
        offsets=_offsets(num_predecessors[nodes]),
        bounds=_offsets(np.array(sizes, dtype=np.int64)),
    )


def start_times(levels: Levels, lags: ArrayLike, durations: ArrayLike) -> Times:
    """Earliest start of every node, in the caller's numbers. `lags` has one entry an edge, `durations` one a node."""
    duration = np.asarray(durations)
    lag = np.asarray(lags)
    dtype = np.int64 if all(each.dtype.kind in "iub" or not each.size for each in (duration, lag)) else np.float64
    duration = duration[levels.nodes].astype(dtype)
    lag = lag[levels.edges].astype(dtype)
    start = np.zeros(levels.nodes.size, dtype=dtype)
    end = duration.copy()
    bounds = levels.bounds.tolist()
    edge_bounds = levels.offsets[levels.bounds].tolist()
    rows = levels.offsets
    for depth in range(1, len(bounds) - 1):
        first, last = bounds[depth], bounds[depth + 1]
        first_edge, last_edge = edge_bounds[depth], edge_bounds[depth + 1]
        ready = end[levels.predecessors[first_edge:last_edge]]
        ready += lag[first_edge:last_edge]
        np.maximum.reduceat(ready, rows[first:last] - first_edge, out=start[first:last])
        np.add(start[first:last], duration[first:last], out=end[first:last])
    in_callers_order = np.empty_like(start)
    in_callers_order[levels.nodes] = start
    return in_callers_order


def critical_path(offsets: ArrayLike, predecessors: ArrayLike, lags: ArrayLike, durations: ArrayLike, start: Times) -> list[int]:
    """Nodes of one longest path, first to last; their durations and the lags between them sum to the makespan.

    Ties go to the smaller number, so the path is the same on every machine.

    >>> critical_path([0, 0, 1, 3], [0, 0, 1], [0, 5, 1], [2, 3, 1], np.array([0, 2, 7]))
    [0, 2]
    """
    rows, sources, lag, duration = np.asarray(offsets), np.asarray(predecessors), np.asarray(lags), np.asarray(durations)
    if not start.size:
        return []
    node = int(np.argmax(start + duration))
    path = [node]
    while rows[node + 1] > rows[node]:
        row = slice(rows[node], rows[node + 1])
        ready = start[sources[row]] + duration[sources[row]] + lag[row]
        node = int(sources[row][ready == ready.max()].min())
        path.append(node)
    return path[::-1]


def _offsets(counts: Indices) -> Indices:
    """Row offsets of rows with these lengths."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


def _row_entries(first: Indices, counts: Indices) -> Indices:
    """Positions first[i] … first[i] + counts[i] - 1 of every row, one row after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(first - (ends - counts), counts) + np.arange(total, dtype=np.int64)


def _cycle(offsets: Indices, sources: Indices, num_missing: Indices) -> Cycle:
    """Walks back from a waiting node to what it waits for, until a node repeats."""
    waiting = np.flatnonzero(num_missing)
    node = int(waiting[0])
    place: dict[int, int] = {}
    path: list[int] = []
    while node not in place:
        place[node] = len(path)
        path.append(node)
        row = sources[offsets[node] : offsets[node + 1]]
        node = int(row[num_missing[row] > 0].min())
    return Cycle(tuple(path[place[node] :]), tuple(waiting.tolist()))

"""Longest path by numpy levels beside a plain Python walk of the same graph, interleaved in one run.

    python benchmarks/longest_path.py [--stages 64] [--microbatches 256] [--chunks 4]

Prints the ratio of the two (median over rounds), for levelling and pricing, and for pricing alone: what search and jitter repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from trainwright.cost import longest_path as fast
from trainwright.schedules import SCHEDULES, timeline
from trainwright.schedules.timeline import Prices, draw

ROUNDS = 3


def graph(stages: int, microbatches: int, chunks: int) -> tuple:
    """The graph of an interleaved schedule, as `draw` hands it to the longest path."""
    caught = []

    def keep(*arguments: object) -> object:
        caught.append(arguments)
        return fast.longest_path(*arguments)

    timeline.longest_path = keep
    draw(SCHEDULES.get("interleaved"), stages, microbatches, chunks, Prices(weight=1, send=1))
    return caught[0]


def plain(num_nodes: int, offsets: list, predecessors: list, lags: list, durations: list) -> list:
    """Kahn's order and one maximum an edge, without numpy."""
    successors = [[] for _ in range(num_nodes)]
    missing = [offsets[node + 1] - offsets[node] for node in range(num_nodes)]
    for node in range(num_nodes):
        for edge in range(offsets[node], offsets[node + 1]):
            successors[predecessors[edge]].append((node, lags[edge]))
    start = [0] * num_nodes
    ready = [node for node in range(num_nodes) if not missing[node]]
    while ready:
        node = ready.pop()
        end = start[node] + durations[node]
        for target, lag in successors[node]:
            start[target] = max(start[target], end + lag)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return start


def timed(function: object, *arguments: object) -> tuple[float, object]:
    """Seconds and result."""
    begin = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - begin, result


def main() -> None:
    """Run both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=4)
    arguments = parser.parse_args()
    num_nodes, *arrays = graph(arguments.stages, arguments.microbatches, arguments.chunks)
    lists = [np.asarray(each).tolist() for each in arrays]
    offsets, predecessors, lags, durations = arrays
    rows = []
    for _ in range(ROUNDS):
        plain_s, wanted = timed(plain, num_nodes, *lists)
        level_s, levels = timed(fast.level, num_nodes, offsets, predecessors)
        walk_s, found = timed(fast.start_times, levels, lags, durations)
        assert wanted == found.tolist()
        rows.append((plain_s / (level_s + walk_s), plain_s / walk_s))
    whole, pricing = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{num_nodes:,} slots: numpy levels are {whole:.1f}x as fast as plain Python once, {pricing:.1f}x when only prices change")


if __name__ == "__main__":
    main()

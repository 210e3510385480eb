"""Longest paths by levels equal longest paths by recursion."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.longest_path import Cycle, critical_path, level, longest_path, start_times


@st.composite
def graphs(draw):
    """(offsets, predecessors, lags, durations) of a graph without circles, its nodes in any order."""
    num_nodes = draw(st.integers(0, 14))
    names = draw(st.permutations(range(num_nodes)))
    rows = [[] for _ in range(num_nodes)]
    for place in range(1, num_nodes):
        for other in draw(st.lists(st.integers(0, place - 1), max_size=4)):
            rows[names[place]].append((names[other], draw(st.integers(-3, 9))))
    offsets = np.cumsum([0, *map(len, rows)])
    edges = [edge for row in rows for edge in row]
    durations = draw(st.lists(st.integers(0, 20), min_size=num_nodes, max_size=num_nodes))
    return offsets, [source for source, _ in edges], [lag for _, lag in edges], durations


def by_recursion(offsets, predecessors, lags, durations):
    """The definition, as it stands."""

    @cache
    def start(node):
        row = range(offsets[node], offsets[node + 1])
        ready = [start(predecessors[edge]) + durations[predecessors[edge]] + lags[edge] for edge in row]
        return max(ready, default=0)

    return [start(node) for node in range(len(durations))]


@given(graph=graphs())
def test_levels_find_what_recursion_finds(graph):
    """Exactly, for whole numbers."""
    assert by_recursion(*graph) == longest_path(len(graph[3]), *graph).tolist()


@given(graph=graphs(), factor=st.integers(1, 5))
def test_a_graph_is_levelled_once_and_priced_often(graph, factor):
    """Levels do not depend on prices; prices scale through."""
    offsets, predecessors, lags, durations = graph
    levels = level(len(durations), offsets, predecessors)
    once = start_times(levels, lags, durations)
    scaled = start_times(levels, np.array(lags, dtype=np.int64) * factor, np.array(durations, dtype=np.int64) * factor)

    assert (once * factor).tolist() == scaled.tolist()


@given(graph=graphs())
def test_a_critical_path_adds_up_to_the_makespan(graph):
    """Durations and lags along it, from a node that waits for nothing."""
    offsets, predecessors, lags, durations = graph
    start = longest_path(len(durations), *graph)
    path = critical_path(offsets, predecessors, lags, durations, start)

    if not durations:
        assert path == []
        return
    assert offsets[path[0]] == offsets[path[0] + 1]
    end = durations[path[0]]
    for before, node in pairwise(path):
        edges = [edge for edge in range(offsets[node], offsets[node + 1]) if predecessors[edge] == before]
        end += max(lags[edge] for edge in edges) + durations[node]
    assert end == (start + durations).max()


@given(graph=graphs(), length=st.integers(1, 4))
def test_a_circle_is_found_and_named(graph, length):
    """However large the graph around it: the nodes named do wait for each other, each for the next."""
    offsets, predecessors, _, durations = graph
    first = len(durations)
    circle = [first + (place + 1) % length for place in range(length)]
    all_offsets = [*offsets.tolist(), *(offsets[-1] + place + 1 for place in range(length))]
    all_predecessors = [*predecessors, *circle]

    with pytest.raises(Cycle) as caught:
        level(first + length, all_offsets, all_predecessors)

    nodes = caught.value.nodes
    assert set(range(first, first + length)) == set(nodes)
    for node, awaited in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        assert awaited in all_predecessors[all_offsets[node] : all_offsets[node + 1]]
    assert set(nodes) <= set(caught.value.waiting)


def test_fractions_make_the_result_fractional():
    """One float among the prices, and times are floats."""
    assert [0.0, 1.5] == longest_path(2, [0, 0, 1], [0], [0.5], [1, 1]).tolist()

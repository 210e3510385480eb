"""Lifetimes of activations: after all passes, every buffer of a microbatch is freed after its last use.

Strategies free what their policy is about (gathered weights, reduced gradients, what was sent); everything else follows from who reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainwright.ir.action import WAITED_KIND, Action, Collective, Compute, Free, Recv, Send, Wait
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.strategies.setting import touched


def free_after_last_use(forward: Sequence[Action], backward: Sequence[Action], *, of: str) -> tuple[Action, ...]:
    """One of the two passes of a stage (`of`: "forward" or "backward"), with a Free behind the last use of each microbatch's buffers.

    Forward leaves what backward reads before it makes it anew. What is sent is left to the settling of the send.
    """
    sent = {action.buffer for action in (*forward, *backward) if isinstance(action, Send)}
    wanted = _entering(backward) if of == "forward" else set()
    actions = forward if of == "forward" else backward
    last = _last_uses(actions, sent | wanted)
    return tuple(_with_frees(actions, last))


def _uses(actions: Sequence[Action]) -> Iterator[tuple[int, tuple[Ref, ...]]]:
    """(index, buffers) of every action; a Wait uses what its exchange holds."""
    lent: dict[tuple[Site, str], tuple[Ref, ...]] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Collective | Send | Recv):
            lent[action.site, WAITED_KIND[type(action)]] = touched(action)
        yield index, lent.pop((action.site, action.kind), ()) if isinstance(action, Wait) else touched(action)


def _entering(actions: Sequence[Action]) -> set[Ref]:
    """Buffers of a microbatch that are read before they are made."""
    made: set[Ref] = set()
    entering: set[Ref] = set()
    for action in actions:
        written = {one.ref for one in action.writes} if isinstance(action, Compute) else set()
        if isinstance(action, Recv):
            written = {action.buffer}
        if isinstance(action, Collective) and action.source != action.target:
            written = {action.target}
        entering |= {ref for ref in touched(action) if ref.microbatch is not None and ref not in made and ref not in written}
        made |= written
    return entering


def _last_uses(actions: Sequence[Action], left: set[Ref]) -> dict[int, list[Ref]]:
    """Index of the last action that uses a buffer -> the buffers that go there."""
    last: dict[Ref, int] = {}
    for index, refs in _uses(actions):
        last |= dict.fromkeys((ref for ref in refs if ref.microbatch is not None and ref not in left), index)
    by_index: dict[int, list[Ref]] = {}
    for ref, index in last.items():
        by_index.setdefault(index, []).append(ref)
    return by_index


def _with_frees(actions: Sequence[Action], last: dict[int, list[Ref]]) -> Iterator[Action]:
    for index, action in enumerate(actions):
        yield action
        if index in last:
            site = action.site
            if isinstance(action, Wait):
                site = replace(site, tag=f"{site.tag}.done" if site.tag else "done")
            yield Free(site=site, buffers=tuple(last[index]))

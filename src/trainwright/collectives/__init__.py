"""Collective algorithms, one file each, written as rounds of transfers.

An algorithm is a module with
    NAME, OPS                                 its public name and the operations it can carry out
    rounds(op, num_ranks)                     yields Rounds; `execute.py` carries them out on numbers
    num_chunks_sent(op, rank, num_ranks)      closed formula; a chunk is payload / num_ranks
    duration_s(op, payload_bytes=…, num_ranks=…, link_bytes_per_s=…, hop_s=…)   closed formula of its time
The closed formulas equal the fold over the rounds (`rounds.py`); the conformance tests hold every algorithm to that.

`payload_bytes` is the full tensor as one rank sees it: the gathered side of an all_gather, the unreduced side of a
reduce_scatter, the whole input of an all_to_all.
"""

from __future__ import annotations

from trainwright.registry import Registry

ALGORITHMS = Registry("trainwright.collectives", "collective algorithm")

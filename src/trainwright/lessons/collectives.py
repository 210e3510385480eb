"""Lesson: the collectives, round by round, with real numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainwright.collectives import ALGORITHMS
from trainwright.collectives.execute import begin, steps
from trainwright.collectives.rounds import chunks_on_links, chunks_sent, rounds_s
from trainwright.ir.figure import Figure
from trainwright.lessons.page import Input, Labelled, Page, Step, Table, Text
from trainwright.units import show_seconds, show_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.collectives.execute import Held
    from trainwright.collectives.rounds import Round, Transfer
    from trainwright.units import Bytes, BytesPerSecond, Seconds

NAME = "collectives"
TITLE = Text("Collectives, round by round", "集合通信，一轮一轮看")
INPUTS = (
    Input(name="ranks", default=4, least=2, most=16, meaning=Text("ranks, P", "进程数 P")),
    Input(name="payload_bytes", default=1_000_000_000, most=10**15, meaning=Text("bytes of the full tensor, n", "完整张量的字节数 n")),
    Input(name="link_bytes_per_s", default=50_000_000_000, most=10**15, meaning=Text("rate of a link, one direction", "链路单向速率")),
    Input(name="hop_ns", default=5_000, least=0, most=10**9, meaning=Text("latency of a hop, in nanoseconds", "单跳延迟，纳秒")),
)

_MEANINGS = {
    "all_reduce": Text("everybody ends with the sum, g = Σ g_i", "每个进程得到总和 g = Σ g_i"),
    "reduce_scatter": Text("rank i ends with piece i of the sum", "进程 i 得到总和的第 i 片"),
    "all_gather": Text("everybody ends with all pieces", "每个进程得到全部分片"),
    "all_to_all": Text("rank i ends with piece i of everybody", "进程 i 得到每个进程的第 i 片"),
    "broadcast": Text("everybody ends with what rank 0 has", "每个进程得到进程 0 的内容"),
}
_WALKED = (
    ("ring", "reduce_scatter"),
    ("ring", "all_gather"),
    ("ring", "all_reduce"),
    ("tree", "all_reduce"),
    ("halving-doubling", "all_reduce"),
    ("direct", "all_to_all"),
)


def page(*, ranks: int, payload_bytes: Bytes, link_bytes_per_s: BytesPerSecond, hop_ns: int) -> Page:
    """Return the page for one group."""
    sizes = {"P": ranks, "n": payload_bytes}
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            Text(
                "An algorithm is a list of rounds; in each, some ranks pass chunks to others, all at once. The steps below carry "
                "them out on numbers: rank r begins with the values 10 (r + 1) + j in chunk j.",
                "一个算法是若干轮传输；每轮中一些进程同时把分块交给另一些 rank。"
                "下面的步骤用真实数字执行：进程 r 的第 j 块初值为 10(r+1)+j。",
            ),
            Text(
                "After P - 1 rounds of a ring that sends i → i + 1, rank i owns the sum of chunk i + 1 (mod P), not of chunk i, if it "
                "began with its own chunk. A ring all-reduce sends 2 (P - 1)/P of the payload from every rank: as much as the payload at P "
                "= 2, 1.75 times at 8.",
                "按 i→i+1 发送的环，若从自己的块开始，P-1 轮后进程 i 拥有第 i+1（mod P）块的和，而不是第 i 块。"
                "环形 all-reduce 每个进程发送 2(P-1)/P 倍的数据：P=2 时 1 倍，P=8 时 1.75 倍。",
            ),
            Text(
                "Libraries do not always use the ring: NCCL chooses among ring, tree, CollNet, NVLS, NVLSTree and PAT, and among the "
                "protocols LL, LL128 and Simple, by a cost model.",
                "通信库并非总用环：NCCL 按代价模型在 ring、tree、CollNet、NVLS、NVLSTree、PAT 以及 LL、LL128、Simple 协议中选择。",
            ),
        ),
        inputs={"ranks": ranks, "payload_bytes": payload_bytes, "link_bytes_per_s": int(link_bytes_per_s), "hop_ns": hop_ns},
        figures={
            "ring_all_reduce_sent_bytes": _sent(
                Text("sent by each rank, ring all-reduce", "每个进程发送，环形 all-reduce"),
                "ring",
                "all_reduce",
                "ceil(2 * (P - 1) * n / P)",
                sizes,
            ),
            "ring_reduce_scatter_sent_bytes": _sent(
                Text("sent by each rank, ring reduce-scatter", "每个进程发送，环形 reduce-scatter"),
                "ring",
                "reduce_scatter",
                "ceil((P - 1) * n / P)",
                sizes,
            ),
            "naive_all_reduce_sent_bytes": _sent(
                Text("sent (and received) by rank 0, naive all-reduce", "进程 0 发送（并接收），朴素 all-reduce"),
                "naive",
                "all_reduce",
                "(P - 1) * n",
                sizes,
            ),
            "ring_all_reduce_factor": _figure(
                Text("payloads sent by each rank, ring all-reduce", "每个进程发送的倍数，环形 all-reduce"),
                ALGORITHMS.get("ring").num_chunks_sent("all_reduce", 0, ranks) / ranks,
                "1",
                "2 * (P - 1) / P",
                {"P": ranks},
            ),
            "ring_owner_shift": _figure(
                Text("rank i owns chunk i + … after the reducing rounds of a ring", "环的归约轮后进程 i 拥有第 i+… 块"),
                _owner_shift(ranks),
                "chunks",
                "1",
                {},
            ),
        },
        steps=tuple(step for algorithm, op in _WALKED for step in _walk(algorithm, op, ranks)),
        tables=(
            Table(
                title=Text("What each operation means", "各操作的含义"),
                columns=(Text("operation", "操作"), Text("result", "结果")),
                rows=tuple(_MEANINGS.items()),
            ),
            _by_algorithm(ranks, payload_bytes, link_bytes_per_s, hop_ns * 1e-9),
        ),
        not_counted=(
            Text("the cost of adding, and of starting a kernel", "加法与启动核函数的开销"),
            Text("links shared with other groups; ranks at unequal distance", "与其他组共享的链路；距离不等的进程"),
            Text("pipelining of a tree by segments; reduction inside switches", "树的分段流水；交换机内归约"),
        ),
        sources=(
            "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations",
            "Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH",
            "NVIDIA nccl-tests, doc/PERFORMANCE.md (bus bandwidth factors)",
        ),
    )


def _figure(label: Text, value: float, unit: str, formula: str, inputs: dict[str, int]) -> Labelled:
    return Labelled(
        label=label,
        wire=unit == "bytes",
        figure=Figure(
            value=value,
            unit=unit,
            formula=formula,
            inputs=inputs,
            source="the algorithm's rounds, counted",
            not_counted="protocol headers and flags",
        ),
    )


def _sent(label: Text, algorithm: str, op: str, formula: str, sizes: dict[str, int]) -> Labelled:
    """Bytes that the busiest rank sends, counted transfer by transfer; whole ones, where the ranks do not divide the tensor."""
    num_chunks = max(chunks_sent(ALGORITHMS.get(algorithm).rounds(op, sizes["P"])).values())
    return _figure(label, -(-num_chunks * sizes["n"] // sizes["P"]), "bytes", formula, sizes)


def _owner_shift(ranks: int) -> int:
    """Which chunk rank 0 holds in full after the reducing rounds of an all-reduce: found by running them."""
    ring = ALGORITHMS.get("ring")
    reducing = [one_round for one_round in ring.rounds("all_reduce", ranks) if one_round[0].reduce]
    *_, held = steps(begin("all_reduce", [np.ones(ranks)] * ranks), reducing)
    return next(number for number, values in held[0].items() if values[0] == ranks)


def _by_algorithm(ranks: int, payload_bytes: Bytes, link_bytes_per_s: BytesPerSecond, hop_s: Seconds) -> Table:
    rows: list[tuple[str | int | float, ...]] = []
    chunk_bytes = payload_bytes / ranks
    for name, part in ALGORITHMS.parts():
        for op in part.OPS:
            rounds: list[Round] = list(part.rounds(op, ranks))
            duration_s = rounds_s(rounds, payload_bytes=payload_bytes, num_ranks=ranks, link_bytes_per_s=link_bytes_per_s, hop_s=hop_s)
            rank_bytes = max(chunks_sent(rounds).values()) * chunk_bytes
            link_bytes = max(chunks_on_links(rounds).values()) * chunk_bytes
            rows.append((op, name, len(rounds), show_wire(rank_bytes), show_wire(link_bytes), show_seconds(duration_s)))
    return Table(
        title=Text("Rounds, bytes and time of each algorithm", "各算法的轮数、字节与时间"),
        columns=(
            Text("operation", "操作"),
            Text("algorithm", "算法"),
            Text("rounds", "轮数"),
            Text("most sent by a rank", "单个进程最多发送"),
            Text("most on a link", "单条链路最多"),
            Text("time", "时间"),
        ),
        rows=tuple(sorted(rows)),
    )


def _walk(algorithm: str, op: str, ranks: int) -> Iterator[Step]:
    """One step a rank and round, with the values it holds afterwards."""
    rounds: list[Round] = list(ALGORITHMS.get(algorithm).rounds(op, ranks))
    whole = [np.array([10.0 * (rank + 1) + chunk for chunk in range(ranks)]) for rank in range(ranks)]
    inputs = [own[rank : rank + 1] for rank, own in enumerate(whole)] if op == "all_gather" else whole
    held = begin(op, inputs)
    yield from _shown(f"{algorithm} {op}", Text("start", "开始"), held, ranks, op)
    for number, (one_round, after) in enumerate(zip(rounds, steps(held, rounds), strict=True), start=1):
        yield from _shown(f"{algorithm} {op}", Text(f"round {number}", f"第 {number} 轮"), after, ranks, op, one_round)


def _shown(walk: str, when: Text, held: Held, ranks: int, op: str, one_round: Round = ()) -> Iterator[Step]:
    for rank in range(ranks):
        moves = [transfer for transfer in one_round if rank in {transfer.from_rank, transfer.to_rank}]
        said = "; ".join(_said(move, ranks, op) for move in moves)
        yield Step(
            event=Text(f"{walk}, {when.en}{': ' if said else ''}{said}", f"{walk}，{when.zh}{'：' if said else ''}{said}"),
            rank=rank,
            buffers={_chunk(number, ranks, op): values[0].item() for number, values in sorted(held[rank].items())},
        )


def _said(move: Transfer, ranks: int, op: str) -> str:
    chunks = ", ".join(_chunk(number, ranks, op) for number in move.chunks)
    return f"{move.from_rank}→{move.to_rank} {'+' if move.reduce else '='} {chunks}"


def _chunk(number: int, ranks: int, op: str) -> str:
    """Name a chunk: c2, or for an all_to_all c1>3, from rank 1 to rank 3."""
    return f"c{number // ranks}>{number % ranks}" if op == "all_to_all" else f"c{number}"

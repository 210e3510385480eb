"""Plans for tests: small ones by a few words, published ones by their row."""

from __future__ import annotations

from typing import Any

from trainwright.plan.plan import Parallel, Plan
from trainwright.spec import catalog
from trainwright.spec.batch import Batch
from trainwright.spec.cluster import Cluster
from trainwright.spec.model import Model
from trainwright.spec.precision import Precision
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

SHAPE = {
    "num_layers": 4,
    "width": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 16,
    "ffn_width": 128,
    "vocab": 256,
    "max_positions": 64,
}

GPT = {"norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True}


def small_plan(
    *,
    mesh: dict[str, int] | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
    zero: dict[str, Any] | None = None,
    sequence: bool = False,
    recompute: str = "none",
    num_microbatches: int = 4,
    model: dict[str, Any] | None = None,
    compute: str = "fp32",
    cluster: str = "local",
) -> Plan:
    """A four-block decoder on as many devices as the mesh has ranks, all in one node."""
    sizes = {"pipeline": 1, "data": 1, "zero": 1, "tensor": 1, **(mesh or {})}
    num_devices = sizes["pipeline"] * sizes["data"] * sizes["zero"] * sizes["tensor"]
    return Plan(
        model=Model(name="small", **{**SHAPE, **(model or {})}),
        cluster=catalog.cluster(cluster).with_devices(num_devices),
        batch=Batch(sequence_tokens=16, global_sequences=num_microbatches * sizes["data"] * sizes["zero"]),
        precision=Precision(compute=compute),
        parallel=Parallel(
            pipeline=Pipeline(size=sizes["pipeline"], schedule=schedule, chunks=chunks),
            data=Data(size=sizes["data"]),
            zero=Zero(size=sizes["zero"], **(zero or {})),
            tensor=Tensor(size=sizes["tensor"], sequence=sequence),
        ),
        recompute=Recompute(policy=recompute),
    )


def published_plan(row: dict[str, Any], stack: str) -> Plan:
    """The plan behind a row of golden/step_times.toml."""
    device = catalog.device("a100-80g")
    mesh = {"pipeline": 1, "data": 1, "tensor": 1, **row["mesh"]}
    num_devices = mesh["pipeline"] * mesh["data"] * mesh["tensor"]
    chunks = row.get("chunks", 1)
    return Plan(
        model=Model(
            name=row["name"],
            num_layers=row["num_layers"],
            width=row["width"],
            num_heads=row["num_heads"],
            num_kv_heads=row["num_heads"],
            head_width=row["width"] // row["num_heads"],
            ffn_width=4 * row["width"],
            vocab=51_200,
            max_positions=2048,
            tied=True,
            dropout=0.1,
            **GPT,
        ),
        cluster=Cluster(
            name="published",
            device=device,
            num_nodes=num_devices // 8,
            devices_per_node=8,
            nic_bytes_per_s=25e9,
            stack=catalog.stack(stack).on("a100-80g"),
        ),
        batch=Batch(
            sequence_tokens=2048, global_sequences=row["global_sequences"], microbatch_sequences=row.get("microbatch_sequences", 1)
        ),
        parallel=Parallel(
            pipeline=Pipeline(size=mesh["pipeline"], schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks),
            data=Data(size=mesh["data"]),
            tensor=Tensor(size=mesh["tensor"], sequence=row["recompute"] == "selective"),
        ),
        recompute=Recompute(policy=row["recompute"]),
    )

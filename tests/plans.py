"""Small plans for tests: strategies are named, everything else has a small size."""

from __future__ import annotations

from dataclasses import replace

from trainwright.plan.plan import Parallel, Plan
from trainwright.spec import catalog
from trainwright.spec.batch import Batch
from trainwright.spec.model import Model
from trainwright.spec.optimizer import Optimizer
from trainwright.spec.precision import Precision
from trainwright.strategies.data import Data
from trainwright.strategies.pipeline import Pipeline
from trainwright.strategies.recompute import Recompute
from trainwright.strategies.tensor import Tensor
from trainwright.strategies.zero import Zero

LLAMA = Model(
    name="small-llama", num_layers=4, width=16, num_heads=4, num_kv_heads=2, head_width=4, ffn_width=24, vocab=32, max_positions=16
)
"""Grouped queries, rotary positions, RMSNorm, SwiGLU, no bias, a head of its own."""

GPT = replace(
    LLAMA,
    name="small-gpt",
    num_kv_heads=4,
    vocab=31,
    tied=True,
    positions="learned",
    norm="layernorm",
    activation="gelu_tanh",
    bias=True,
)
"""Learned positions, LayerNorm, GELU, biases, a head that is the embedding; a vocabulary that no tensor size divides."""

LEAST_BLOCKS = 2
"""A plan without a pipeline gets as many."""

Strategy = Pipeline | Data | Zero | Tensor | Recompute


def small_plan(
    *strategies: Strategy,
    model: Model = LLAMA,
    num_microbatches: int = 4,
    microbatch_sequences: int = 1,
    compute: str = "fp64",
    optimizer: Optimizer | None = None,
    seed: int = 0,
) -> Plan:
    """A plan with these strategies; 8 tokens a sequence, one block a stage, clipping at work from the first step."""
    given = {type(one): one for one in strategies}
    parallel = Parallel(
        **{
            kind.__name__.lower(): given[kind]  # type: ignore[arg-type]  # the field of a strategy is its name
            for kind in (Pipeline, Data, Zero, Tensor)
            if kind in given
        }
    )
    sizes = parallel.sizes
    num_blocks = max(sizes["pipeline"] * parallel.pipeline.chunks, LEAST_BLOCKS)
    num_ranks = sizes["pipeline"] * sizes["data"] * sizes["zero"] * sizes["tensor"]
    replicas = sizes["data"] * sizes["zero"]
    recompute = given.get(Recompute, Recompute())
    assert isinstance(recompute, Recompute)
    plan = Plan(
        model=replace(model, num_layers=sum(parallel.pipeline.layers) or num_blocks),
        cluster=catalog.cluster("local").with_devices(num_ranks),
        batch=Batch(
            sequence_tokens=8,
            global_sequences=num_microbatches * microbatch_sequences * replicas,
            microbatch_sequences=microbatch_sequences,
        ),
        precision=Precision(compute=compute),
        parallel=parallel,
        recompute=recompute,
        optimizer=optimizer or Optimizer(lr=1e-2, clip_norm=0.05, warmup_steps=1),
    )
    return replace(plan, run=replace(plan.run, seed=seed))


def title(plan: Plan) -> str:
    """What is special about a plan, in a few words: the name of a test."""
    words = [plan.model.name.removeprefix("small-")]
    pipeline, zero, tensor = plan.parallel.pipeline, plan.parallel.zero, plan.parallel.tensor
    if pipeline.size > 1:
        words.append(f"pipeline{pipeline.size}-{pipeline.schedule}")
    if plan.size("data") > 1:
        words.append(f"data{plan.size('data')}")
    if zero.size > 1:
        words.append(f"zero{zero.stage}x{zero.size}")
        plain = Zero()
        words += [f"{name}={getattr(zero, name)}" for name in OPTIONS if getattr(zero, name) != getattr(plain, name)]
    if tensor.size > 1:
        words.append(f"tensor{tensor.size}" + ("-sequence" if tensor.sequence else "") + ("-kept" if tensor.keep_gathered else ""))
    if plan.recompute.policy != "none":
        words.append(f"recompute-{plan.recompute.policy}")
    if plan.model.dropout:
        words.append("dropout")
    words.append(f"M{plan.num_microbatches}x{plan.batch.microbatch_sequences}")
    return "-".join(words)


OPTIONS = ("reshard_after_forward", "prefetch", "free", "gradients", "overlap")
"""Options of `zero` that show in a title."""

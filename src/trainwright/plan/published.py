"""Published: the JSON Schema as an editor and a reader need it.

What pydantic derives from the tables is a check, not an explanation. Here fixed words become enums, tables and keys get their meaning,
and what TOML cannot hold goes: it has no null, so an absent key is simply not written. Nothing here takes part in reading a plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainwright.schedules import SCHEDULES
from trainwright.spec.formats import LANDED
from trainwright.spec.model import ACTIVATIONS, FAMILIES, NORMS, POSITIONS
from trainwright.spec.optimizer import DECAYS, NUM_MOMENTS
from trainwright.strategies.recompute import POLICIES

_COLUMN: Final = re.compile(r"^(\w+) {2,}(\S.*(?:\n {2,}\S.*)*)", re.MULTILINE)  # a key of a docstring and its meaning

_TABLES: Final[Mapping[str, str]] = {
    "Pipeline": "The blocks are cut into size * chunks stages; activations travel from position to position.",
    "Data": "Plain replicas, each with its part of the batch; gradients are summed once a step.",
    "Zero": "Replicas that share the state: stage 1 cuts the optimizer's, stage 2 the gradients too, stage 3 the weights too.",
    "Context": "One sequence divided over ranks; sizes above 1 have not landed.",
    "Expert": "The experts of a mixture divided over ranks; sizes above 1 have not landed.",
    "Tensor": "Each matrix is cut over ranks; the size divides heads, key-value heads and the feed-forward width.",
    "Recompute": 'What runs again in backward, so that less is kept; `blocks` counts only under the policy "blocks".',
    "Precision": "The number format of each copy of the state; what is not named follows from `compute`.",
    "RunSettings": "What a run needs beyond the plan's mathematics: steps, text, seed, checkpoints.",
}
"""A sentence for each table whose docstring is written for readers of the source."""

_KEYS: Final[Mapping[str, str]] = {
    "Batch.sequence_tokens": "tokens of a sequence",
    "Batch.global_sequences": "sequences of one step, over all replicas",
    "Batch.microbatch_sequences": "sequences that go through a replica at a time",
    "Pipeline.size": "positions",
    "Pipeline.schedule": "the order in which a position visits its microbatches",
    "Pipeline.chunks": 'virtual stages on a position: 1; under "interleaved" from 2, and 2 if absent',
    "Pipeline.layers": "blocks of each virtual stage, in model order; cut evenly if absent",
    "Data.size": "replicas",
    "Zero.size": "ranks that share",
    "Zero.stage": "what is cut",
    "Zero.reshard_after_forward": "false: a unit stays gathered from its first forward of the step to its last backward",
    "Zero.prefetch": "units that are gathered ahead",
    "Zero.free": "when gathered weights go, relative to the reduction of gradients",
    "Zero.gradients": "from stage 2: reduced every microbatch, or once a step",
    "Zero.overlap": "false: each reduction is waited for at once",
    "Tensor.size": "ranks",
    "Tensor.sequence": "cut the residual stream along the sequence too",
    "Tensor.keep_gathered": "with sequence: keep gathered inputs for backward, in place of gathering them again",
    "Recompute.policy": "selective: the attention core runs again; full: each block, from its input",
    "Recompute.blocks": "full, for the first so many blocks of each stage",
    "OffloadTable.optimizer": "true has not landed",
    "Optimizer.betas": "of adamw",
    "Optimizer.eps": "of adamw",
    "RunSettings.seed": "initial values, dropout, order of the text",
    "RunSettings.steps": "steps of the run, unless tokens says more",
    "RunSettings.validate_every": "steps between looks at the text that is kept out",
    "RunSettings.tokenizer": "path of a tokenizer.json; without it bytes are the tokens",
    "RunSettings.checkpoint": "without it nothing is saved",
    "Recompute.budget": "refused: has not landed",
    "Optimizer.min_lr_fraction": "of lr, where the decay ends",
    "Checkpoint.folder": "relative to the plan file",
    "Checkpoint.every": "steps between checkpoints",
    "Checkpoint.keep": "the newest so many stay, older ones are removed",
}
"""Meanings of keys that no docstring tells, or not for readers of a file."""


def published(given: Mapping[str, Any], title: str) -> dict[str, Any]:
    """A schema as pydantic made it, told to a reader."""
    tables = {name: _table(name, table) for name, table in given.get("$defs", {}).items()}
    whole = _table(title, {name: value for name, value in given.items() if name != "$defs"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": tables, **whole, "title": title}


def _table(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    docstring = table.get("description", "")
    meanings = {key: " ".join(text.split()) for key, text in _COLUMN.findall(docstring)}
    about = _TABLES.get(name, docstring.partition("\n\n")[0])
    keys = {key: _key(f"{name}.{key}", value, meanings.get(key)) for key, value in table.get("properties", {}).items()}
    return {**table, "description": " ".join(about.split()), "properties": keys}


def _key(path: str, given: Mapping[str, Any], meaning: str | None) -> dict[str, Any]:
    """One key: its words, its meaning, and a default only where a file could hold it."""
    key = {name: value for name, value in _without_null(given).items() if name != "title"}
    default = key.get("default")
    if default is None or (isinstance(default, int) and default < key.get("minimum", default)):
        key.pop("default", None)
    words = dict(_words()).get(path)
    if words is not None:
        key = {"enum": list(words)} | {name: value for name, value in key.items() if name != "type"}
    meaning = key.get("description") or _KEYS.get(path) or meaning
    return key | {"description": meaning} if meaning else key


def _without_null(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of "this or null", this."""
    options = [one for one in given.get("anyOf", ()) if one != {"type": "null"}]
    if len(options) != 1:
        return dict(given)
    return {**options[0], **{name: value for name, value in given.items() if name != "anyOf"}}


def _words() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The words that a key may hold, where they are fixed. `plan/check.py` refuses others, each with a message of its own."""
    yield "Pipeline.schedule", SCHEDULES.names()
    yield "Zero.free", ("before-reduce", "after-reduce")
    yield "Zero.gradients", ("sharded", "whole")
    yield "Context.method", ("ring",)
    yield "Recompute.policy", POLICIES
    yield "Optimizer.name", tuple(NUM_MOMENTS)
    yield "Optimizer.decay", DECAYS
    for copy in ("compute", "weights", "gradients", "optimizer", "reduce", "activations"):
        yield f"Precision.{copy}", LANDED
    yield "Precision.master", (*LANDED, "none")
    yield "Model.family", FAMILIES
    yield "Model.norm", NORMS
    yield "Model.positions", POSITIONS
    yield "Model.activation", ACTIVATIONS

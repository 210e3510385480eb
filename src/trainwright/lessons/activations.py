"""Lesson: why activations grow so fast, and what one block really keeps for its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.ir.figure import Figure
from trainwright.lessons.page import Input, Labelled, Page, Step, Table, Text
from trainwright.problems import Problem, raise_all
from trainwright.spec.families.decoder import describe
from trainwright.spec.families.local import Local
from trainwright.spec.formats import bytes_of
from trainwright.spec.model import Model
from trainwright.units import Bytes, show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.spec.families.segment import Family

NAME = "activations"
TITLE = Text("Why activations grow so fast", "激活为什么增长得这么快")
INPUTS = (
    Input(name="batch", default=1, most=65_536, meaning=Text("sequences of a microbatch, B", "一个微批次的序列数 B")),
    Input(name="tokens", default=8192, most=16_777_216, meaning=Text("tokens of a sequence, T", "序列长度 T")),
    Input(name="heads", default=32, most=4096, meaning=Text("query heads, H", "查询头数 H")),
    Input(
        name="kv_heads",
        default=32,
        most=4096,
        meaning=Text("key-value heads, K; equal to H without grouping", "键值头数 K；不分组时等于 H"),
    ),
    Input(name="head_width", default=128, most=4096, meaning=Text("width of a head, d", "头维度 d")),
    Input(name="ffn_width", default=14336, most=1_048_576, meaning=Text("inner width of the feed-forward part, F", "前馈内部宽度 F")),
    Input(name="element_bytes", default=2, least=2, most=8, meaning=Text("bytes of an element: 2, 4 or 8", "每个元素的字节数：2、4 或 8")),
)

_FORMATS = {bytes_of(name): name for name in ("bf16", "fp32", "fp64")}

_NAMES = {
    "x": Text("residual stream into the block", "进入本层的残差流"),
    "x2": Text("residual stream after attention", "注意力之后的残差流"),
    "h1": Text("normed input of attention", "注意力的归一化输入"),
    "h2": Text("normed input of the feed-forward part", "前馈的归一化输入"),
    "qkv": Text("queries, keys, values, rotated", "Q、K、V（已旋转）"),
    "c": Text("attention result", "注意力输出"),
    "rstd": Text("statistics of a norm", "归一化的统计量"),
    "lse": Text("log-sum of each score row", "每行分数的 log-sum"),
    "gate_up": Text("gate and up", "gate 与 up"),
    "act": Text("SiLU(gate) × up", "SiLU(gate) × up"),
}


def page(*, batch: int, tokens: int, heads: int, kv_heads: int, head_width: int, ffn_width: int, element_bytes: Bytes) -> Page:
    """Return the page for one shape. Raises PlanError for a shape that no decoder has."""
    model = Model(
        name="lesson",
        num_layers=1,
        width=heads * head_width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        ffn_width=ffn_width,
        vocab=1,
        max_positions=tokens,
    )
    raise_all((*_format_problems(element_bytes), *model.check()))
    compute = _FORMATS[element_bytes]
    family = describe(model, Local(num_sequences=batch, sequence_tokens=tokens, compute=compute))
    sizes = {"B": batch, "T": tokens, "H": heads, "K": kv_heads, "d": head_width, "F": ffn_width, "e": element_bytes}
    kept = list(_kept(family))
    num_kept_bytes = sum(num_bytes for _, _, num_bytes in kept)
    return Page(
        name=NAME,
        title=TITLE,
        text=(
            Text(
                "Four tensors of one layer, by formula. The score matrix grows with the square of the sequence; a fused kernel never "
                "writes it, and keeps one number a row instead.",
                "一层中的四个张量，按公式计算。分数矩阵随序列长度平方增长；融合核不写出它，每行只保留一个数。",
            ),
            Text(
                "The table lists what the planner's own decoder block keeps from forward to backward, without recompute.",
                "下表列出规划器自己的解码层在不重算时，从前向保留到反向的全部张量。",
            ),
        ),
        inputs={
            "batch": batch,
            "tokens": tokens,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_width": head_width,
            "ffn_width": ffn_width,
            "element_bytes": element_bytes,
        },
        figures=_figures(family, sizes, element_bytes, num_kept_bytes),
        steps=tuple(_steps(family)),
        tables=(
            Table(
                title=Text("Kept for backward, by the segment that asks for it", "为反向保留的张量，按需要它的算子段"),
                columns=(Text("segment", "算子段"), Text("tensor", "张量"), Text("bytes", "字节"), Text("size", "大小")),
                rows=(
                    *((segment, _NAMES.get(name, name), num_bytes, show_bytes(num_bytes)) for segment, name, num_bytes in kept),
                    (Text("all", "合计"), "", num_kept_bytes, show_bytes(num_kept_bytes)),
                ),
            ),
        ),
        not_counted=(
            Text("one layer: embedding, logits and loss are not in it", "只算一层：不含 embedding、logits 与 loss"),
            Text("workspace inside operators, and the allocator's rounding", "算子内部的 workspace 与分配器的取整"),
            Text("scales of 8-bit formats; dropout masks", "8 位格式的缩放系数；dropout 掩码"),
            Text("recompute and tensor or sequence sharding: `predict` counts them", "重算、张量或序列切分：由 `predict` 计算"),
        ),
        sources=(
            "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4",
            "Dao et al. 2022, FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness, section 3.1",
        ),
    )


def _format_problems(element_bytes: Bytes) -> Iterator[Problem]:
    if element_bytes not in _FORMATS:
        yield Problem(
            f"no format of {element_bytes} bytes an element",
            path="element_bytes",
            given=element_bytes,
            allowed=tuple(_FORMATS),
            attempt="element_bytes=2",
        )


def _figures(family: Family, sizes: dict[str, int], element_bytes: Bytes, num_kept_bytes: Bytes) -> dict[str, Labelled]:
    num_scores = family.segment("core").forward.work.ops[0].score_elements
    gate_up = next(num_bytes for name, num_bytes in _pieces(family, "feed.saved") if name == "gate_up")
    listed = (
        (
            "score_matrix_bytes",
            Text("score matrix, if it were written", "分数矩阵（若写出）"),
            num_scores * element_bytes,
            "B * H * T**2 * e",
        ),
        ("qkv_bytes", Text("queries, keys, values", "Q、K、V"), family.activations["qkv"].num_bytes, "B * T * (H + 2 * K) * d * e"),
        ("gate_up_bytes", Text("gate and up", "gate 与 up"), gate_up, "2 * B * T * F * e"),
        ("residual_bytes", Text("residual stream", "残差流"), family.activations["x"].num_bytes, "B * T * H * d * e"),
        (
            "kept_bytes",
            Text("kept for backward by one block", "一层为反向保留"),
            num_kept_bytes,
            "B * T * (4 * H * d + (H + 2 * K) * d + H * d + 3 * F) * e + w * B * T * (2 + H)",
        ),
    )
    wide = {"w": 8 if element_bytes == 8 else 4}
    return {
        name: Labelled(
            label=label,
            figure=Figure(
                value=value,
                unit="bytes",
                formula=formula,
                inputs=_used(formula, sizes | wide),
                source="the decoder family, as the planner sees it",
                not_counted="workspace, allocator rounding",
            ),
        )
        for name, label, value, formula in listed
    }


def _used(formula: str, inputs: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in inputs.items() if name in formula.replace("*", " ").replace("(", " ").replace(")", " ").split()}


def _kept(family: Family) -> Iterator[tuple[str, str, Bytes]]:
    """(segment, tensor, bytes) of everything that lives from forward to backward; a tensor kept twice counts once."""
    seen: set[str] = set()
    for segment in family.block:
        for name in segment.keeps:
            if name not in seen:
                seen.add(name)
                yield segment.name, name, family.activations[name].num_bytes
        if segment.saved:
            for name, num_bytes in _pieces(family, f"{segment.name}.saved"):
                yield segment.name, name, num_bytes


def _pieces(family: Family, buffer: str) -> Iterator[tuple[str, Bytes]]:
    for name, shape, fmt in family.activations[buffer].pieces:
        num_bytes = bytes_of(fmt)
        for size in shape:
            num_bytes *= size
        yield name, num_bytes


def _steps(family: Family) -> Iterator[Step]:
    """The block segment by segment, with what is kept so far."""
    kept = list(_kept(family))
    so_far = 0
    for segment in family.block:
        so_far += sum(num_bytes for name, _, num_bytes in kept if name == segment.name)
        yield Step(event=Text(f"forward of {segment.name}", f"{segment.name} 前向"), buffers={"kept_bytes": so_far})

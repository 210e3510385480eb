"""Dense decoders: GPT-2 and 3, Llama 1 to 3.

Shape letters: b sequences of a microbatch, s tokens of a sequence, u tokens of a sequence on the residual stream of one rank (s, or s/t
under
sequence parallelism), h width, H query heads, K key-value heads, d head width, f inner width of the feed-forward part, V vocabulary, t
tensor size.

A block is seven segments:

    norm1   x -> h1                 core   qkv -> c               norm2   x, a -> x2 = x + a, h2         add   x2, f -> x of the next block
    qkv     h1 -> qkv (rotated)     out    c -> a (partial)       feed    h2 -> f (partial)

Biases of `out` and of the feed-forward part are added after the sum over tensor, hence in `norm2` and `add`. What is replicated over
tensor lives in the segments of the residual stream. Loss: the vocabulary may be cut, so it is taken in three steps that need only two
small sums.
Left out: dropout of attention weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainwright.ir.buffer import Buffer
from trainwright.ir.layout import Partial, Replicate, Shard
from trainwright.ir.work import Op, OpKind, Work
from trainwright.spec.families.local import Local
from trainwright.spec.families.segment import Argument, Family, Parameter, Pass, Segment, Unit
from trainwright.spec.formats import bytes_of
from trainwright.spec.model import Model
from trainwright.units import Bytes

NAME: Final = "decoder"

SEQUENCE, FEATURE = 1, 2

RANDOM_SLAB = 1 << 16
"""Random numbers are made so many at a time (engine/random.py)."""

CHUNK_ROWS = 256
"""Rows of scores that the loss widens at a time (engine/segments/sums.py)."""

STREAM = ("e", "x", "x2", "h1", "h2", "h", "a", "f", "de", "dx", "dm", "da", "df", "dh1", "dh2", "dh")
"""Activations of the width of the residual stream: cut along the sequence under sequence parallelism, whole or partial beside it."""


def describe(model: Model, local: Local) -> Family:
    """The family of a decoder as one rank sees it. Raises nothing: the plan has been checked."""
    return _Decoder(model, local).family()


def initial_std(model: Model, name: str) -> float:
    """Standard deviation of a matrix at the start: 0.02, less for those that write to the residual stream.

    Source: Radford et al. 2019 (GPT-2): scaled by 1/sqrt(2 L).
    """
    return 0.02 / (2 * model.num_layers) ** 0.5 if name in {"out.weight", "down.weight"} else 0.02


class _Decoder:
    def __init__(self, model: Model, local: Local) -> None:
        self.model, self.local = model, local
        t = local.num_tensor
        self.b, self.s = local.num_sequences, local.sequence_tokens
        self.u = self.s // t if local.sequence else self.s
        self.N, self.U = self.b * self.s, self.b * self.u
        self.h, self.d = model.width, model.head_width
        self.Ht, self.Kt = model.num_heads // t, model.num_kv_heads // t
        self.qkv = (self.Ht + 2 * self.Kt) * self.d
        self.ft = model.ffn_width // t
        self.Vt = -(-model.vocab // t)
        self.e, self.w = bytes_of(local.compute), bytes_of(local.wide)
        self.stream = local.on_tensor(Shard(SEQUENCE) if local.sequence else Replicate())
        self.partial = local.on_tensor(Partial())
        self.feature = local.on_tensor(Shard(FEATURE))
        self.norm_stats = 2 if model.norm == "layernorm" else 1
        self.drops = model.dropout > 0
        self.enters = model.positions == "learned" or self.drops
        self.narrow = local.compute == "bf16"
        self.drop = self.drop_bytes() if self.drops else 0

    def drop_bytes(self) -> Bytes:
        """What dropout holds inside: a mask of one sequence, and the random words it is made from, slab by slab."""
        return self.e * self.u * self.h + 32 * self.h * min(self.u, max(1, RANDOM_SLAB // self.h))

    def narrow_product_bytes(self, num_elements: int) -> Bytes:
        """A weight gradient formed in bf16 before it is added to fp32 ones."""
        return self.e * num_elements if self.narrow else 0

    def norm_bytes(self, *, backward: bool) -> Bytes:
        """Norms of bf16 tensors are computed in fp32: the widened tensors."""
        widened = 12 if backward else 4 * self.norm_stats
        return widened * self.U * self.h if self.narrow else 0

    # --- parameters ------------------------------------------------------------------------------------------------------------

    def parameter(self, name: str, *shape: int, tensor_dim: int | None = None, initial: str = "normal") -> Parameter:
        t = self.local.num_tensor
        cut = tuple(-(-size // t) if dim == tensor_dim else size for dim, size in enumerate(shape))
        std = initial_std(self.model, name) if initial == "normal" else 0.0
        return Parameter(name=name, shape=shape, local_shape=cut, tensor_dim=tensor_dim if t > 1 else None, initial=initial, std=std)

    def norm_parameters(self, name: str) -> list[Parameter]:
        bias = [self.parameter(f"{name}.bias", self.h, initial="zeros")] if self.model.norm_bias else []
        return [self.parameter(f"{name}.weight", self.h, initial="ones"), *bias]

    def biases(self, *named: tuple[str, int, bool]) -> list[Parameter]:
        if not self.model.bias:
            return []
        return [self.parameter(f"{name}.bias", size, tensor_dim=0 if cut else None, initial="zeros") for name, size, cut in named]

    def units(self) -> dict[str, Unit]:
        m, h = self.model, self.h
        heads, kv = m.num_heads * self.d, m.num_kv_heads * self.d
        feed = ["gate", "up"] if m.gated else ["up"]
        block = [
            *self.norm_parameters("norm1"),
            *self.norm_parameters("norm2"),
            *self.biases(("out", h, False), ("feed", h, False)),
            *(self.parameter(f"{name}.weight", size, h, tensor_dim=0) for name, size in (("q", heads), ("k", kv), ("v", kv))),
            *self.biases(("q", heads, True), ("k", kv, True), ("v", kv, True)),
            self.parameter("out.weight", h, heads, tensor_dim=1),
            *(self.parameter(f"{name}.weight", m.ffn_width, h, tensor_dim=0) for name in feed),
            *self.biases(*((name, m.ffn_width, True) for name in feed)),
            self.parameter("down.weight", h, m.ffn_width, tensor_dim=1),
        ]
        head = self.norm_parameters("final")
        if not m.tied:
            head.append(self.parameter("head.weight", m.vocab, h, tensor_dim=0))
        units = {
            "embed": Unit.of("embed", (self.parameter("embed.tokens", m.vocab, h, tensor_dim=0),)),
            "block": Unit.of("block", tuple(block)),
            "head": Unit.of("head", tuple(head)),
        }
        if m.positions == "learned":
            units["positions"] = Unit.of("positions", (self.parameter("positions.table", m.max_positions, h),))
        return units

    # --- activations -----------------------------------------------------------------------------------------------------------

    def buffer(self, *shape: int, wide: bool = False) -> Buffer:
        fmt = self.local.wide if wide else self.local.compute
        total = 1
        for size in shape:
            total *= size
        return Buffer(shape=shape, format=fmt, part="activations", num_bytes=total * bytes_of(fmt))

    def kept(self, *pieces: tuple[str, tuple[int, ...], bool]) -> Buffer:
        listed = tuple((name, shape, self.local.wide if wide else self.local.compute) for name, shape, wide in pieces)
        total = sum(self.buffer(*shape, wide=wide).num_bytes for _, shape, wide in pieces)
        return Buffer(shape=(), format="", part="activations", num_bytes=total, pieces=listed)

    def activations(self) -> dict[str, Buffer]:
        b, s, u, h = self.b, self.s, self.u, self.h
        stream = replace(self.buffer(b, u, h), layout=self.stream)
        norm = self.kept(*((name, (b, u), True) for name in (("mean", "rstd") if self.norm_stats > 1 else ("rstd",))))
        inner = ("gate_up", (b, s, 2 * self.ft), False) if self.model.gated else ("pre", (b, s, self.ft), False)
        logits = self.buffer(b, s, self.Vt)
        buffers = {
            **dict.fromkeys(STREAM, stream),
            "qkv": self.buffer(b, s, self.qkv),
            "dqkv": self.buffer(b, s, self.qkv),
            "c": self.buffer(b, s, self.Ht * self.d),
            "dc": self.buffer(b, s, self.Ht * self.d),
            **dict.fromkeys(("norm1.saved", "norm2.saved", "final.saved"), norm),
            "core.saved": self.kept(("lse", (b, self.Ht, s), True)),
            "feed.saved": self.kept(inner, ("act", (b, s, self.ft), False)),
            "z": logits,
            "dz": logits,
            "m": self.buffer(b, s, wide=True),
            "r": self.buffer(2, b, s, wide=True),
            "dr": self.buffer(2, b, s, wide=True),
            "loss": self.buffer(wide=True),
        }
        if not self.enters:
            del buffers["e"], buffers["de"]
        return buffers

    # --- segments --------------------------------------------------------------------------------------------------------------

    def gemm(self, name: str, m: int, n: int, k: int, *, weight: bool = False) -> Op:
        kind = OpKind.GEMM_WEIGHT if weight else OpKind.GEMM
        return Op(name=name, kind=kind, flops=2 * m * n * k, num_bytes=(m * k + k * n + m * n) * self.e, k=k, format=self.local.compute)

    def touch(self, name: str, num_elements: int, *, element_bytes: Bytes | None = None) -> Op:
        """An elementwise operator that reads and writes `num_elements` in all."""
        size = self.e if element_bytes is None else element_bytes
        return Op(name=name, kind=OpKind.ELEMENTWISE, num_bytes=num_elements * size, format=self.local.compute)

    def linear(self, name: str, rows: int, into: int, out: int) -> tuple[Work, Work]:
        """Forward and backward (input gradient, weight gradient) of a matrix [out, into] over `rows` rows."""
        forward = Work((self.gemm(name, rows, out, into),))
        backward = Work((self.gemm(f"{name}.input", rows, into, out), self.gemm(f"{name}.weight", out, into, rows, weight=True)))
        return forward, backward

    def family(self) -> Family:
        return Family(
            before=(self.embed(), *([self.enter()] if self.enters else [])),
            block=(self.norm1(), self.qkv_segment(), self.core(), self.out(), self.norm2(), self.feed(), self.add()),
            after=(self.final(), self.logits(), self.peak(), self.sums(), self.loss()),
            units=self.units(),
            activations=self.activations(),
            stream=frozenset(STREAM),
        )

    def embed(self) -> Segment:
        result, gradient = ("e", "de" if self.drops else "dx") if self.enters else ("x", "dx")
        rows, cut = self.N * self.h, self.local.num_tensor > 1
        return Segment(
            name="embed",
            unit="embed",
            parameters=("embed.tokens",),
            forward=Pass(
                writes=(Argument(result, layout=self.partial),),
                work=Work((self.touch("embed", 2 * rows),)),
                temporary_bytes=10 * self.N if cut else 0,
            ),
            backward=Pass(
                reads=(Argument(gradient),),
                work=Work((self.touch("embed", 3 * rows),)),
                temporary_bytes=(4 * rows if self.narrow else 0) + (self.e * rows if cut else 0),
            ),
        )

    def enter(self) -> Segment:
        learned = self.model.positions == "learned"
        size = self.U * self.h
        return Segment(
            name="enter",
            unit="positions" if learned else None,
            parameters=("positions.table",) if learned else (),
            forward=Pass(
                reads=(Argument("e", layout=self.stream),),
                writes=(Argument("x", layout=self.stream),),
                work=Work((self.touch("enter", 3 * size),)),
            ),
            backward=Pass(
                reads=(Argument("dx", layout=self.stream),),
                writes=(Argument("de", layout=self.stream),) if self.drops else (),
                work=Work((self.touch("enter", 2 * size),)),
                temporary_bytes=max(self.drop, self.e * self.u * self.h if learned else 0),
            ),
        )

    def norm1(self) -> Segment:
        size = self.U * self.h
        return Segment(
            name="norm1",
            unit="block",
            parameters=tuple(one.name for one in self.norm_parameters("norm1")),
            forward=Pass(
                reads=(Argument("x", layout=self.stream),),
                writes=(Argument("h1", layout=self.stream),),
                work=Work((self.touch("norm1", 2 * size),)),
            ),
            backward=Pass(
                reads=(Argument("dh1", layout=self.stream), Argument("dm", layout=self.stream)),
                writes=(Argument("dx", layout=self.stream),),
                work=Work((self.touch("norm1", 4 * size),)),
                temporary_bytes=self.norm_bytes(backward=True),
            ),
            keeps=("x",),
            saved=True,
        )

    def qkv_segment(self) -> Segment:
        forward, backward = self.linear("qkv", self.N, self.h, self.qkv)
        names = ("q.weight", "k.weight", "v.weight", *(("q.bias", "k.bias", "v.bias") if self.model.bias else ()))
        return Segment(
            name="qkv",
            unit="block",
            parameters=names,
            forward=Pass(
                reads=(Argument("h1"),),
                writes=(Argument("qkv", layout=self.feature),),
                work=Work((*forward.ops, *self.rope())),
                temporary_bytes=self.e * self.N * (self.Ht + self.Kt) * self.d // 2 if self.rope() else 0,
            ),
            backward=Pass(
                reads=(Argument("dqkv", layout=self.feature),),
                writes=(Argument("dh1", layout=self.partial),),
                work=backward,
                temporary_bytes=self.narrow_product_bytes(self.qkv * self.h),
            ),
            keeps=("h1",),
        )

    def rope(self) -> tuple[Op, ...]:
        """The rotation of queries and keys; backward turns back in `core`."""
        return (self.touch("rope", 2 * self.N * (self.Ht + self.Kt) * self.d),) if self.model.positions == "rope" else ()

    def core(self) -> Segment:
        """FLOPs count the causal half: 2 products forward, 5 backward (scores again, then dV, dP, dQ, dK)."""
        product = 2 * self.b * self.Ht * self.s * self.s * self.d // 2
        scores = self.b * self.Ht * self.s * self.s
        forward_bytes = (self.N * self.qkv + self.N * self.Ht * self.d) * self.e

        def op(kind: OpKind, products: int, num_bytes: Bytes) -> Op:
            return Op(
                name="core",
                kind=kind,
                flops=products * product,
                num_bytes=num_bytes,
                k=self.d,
                score_elements=scores,
                format=self.local.compute,
            )

        return Segment(
            name="core",
            forward=Pass(
                reads=(Argument("qkv", layout=self.feature),),
                writes=(Argument("c", layout=self.feature),),
                work=Work((op(OpKind.ATTENTION_FORWARD, 2, forward_bytes),)),
            ),
            backward=Pass(
                reads=(Argument("dc", layout=self.feature),),
                writes=(Argument("dqkv", layout=self.feature),),
                work=Work((op(OpKind.ATTENTION_BACKWARD, 5, 2 * forward_bytes), *self.rope())),
                temporary_bytes=self.e * self.N * self.qkv,
            ),
            keeps=("qkv", "c"),
            saved=True,
        )

    def out(self) -> Segment:
        forward, backward = self.linear("out", self.N, self.Ht * self.d, self.h)
        return Segment(
            name="out",
            unit="block",
            parameters=("out.weight",),
            forward=Pass(reads=(Argument("c", layout=self.feature),), writes=(Argument("a", layout=self.partial),), work=forward),
            backward=Pass(
                reads=(Argument("da" if self.drops else "dm"),),
                writes=(Argument("dc", layout=self.feature),),
                work=backward,
                temporary_bytes=self.narrow_product_bytes(self.h * self.Ht * self.d),
            ),
            keeps=("c",),
        )

    def norm2(self) -> Segment:
        size = self.U * self.h
        grads = (Argument("dm", layout=self.stream), *([Argument("da", layout=self.stream)] if self.drops else []))
        return Segment(
            name="norm2",
            unit="block",
            parameters=(*(one.name for one in self.norm_parameters("norm2")), *(("out.bias",) if self.model.bias else ())),
            forward=Pass(
                reads=(Argument("x", layout=self.stream), Argument("a", layout=self.stream)),
                writes=(Argument("x2", layout=self.stream), Argument("h2", layout=self.stream)),
                work=Work((self.touch("norm2", 5 * size),)),
                temporary_bytes=max(self.norm_bytes(backward=False), self.drop),
            ),
            backward=Pass(
                reads=(Argument("dh2", layout=self.stream), Argument("dx", layout=self.stream, next_block=True)),
                writes=grads,
                work=Work((self.touch("norm2", (4 + self.drops) * size),)),
                temporary_bytes=max(self.norm_bytes(backward=True), self.drop),
            ),
            keeps=("x2",),
            saved=True,
        )

    def feed(self) -> Segment:
        wide = (2 if self.model.gated else 1) * self.ft
        up_forward, up_backward = self.linear("up", self.N, self.h, wide)
        down_forward, down_backward = self.linear("down", self.N, self.ft, self.h)
        act_forward = self.touch("activation", self.N * (wide + self.ft))
        act_backward = self.touch("activation", self.N * (2 * wide + self.ft))
        feed = ("gate", "up") if self.model.gated else ("up",)
        names = (*(f"{name}.weight" for name in feed), *((f"{name}.bias" for name in feed) if self.model.bias else ()), "down.weight")
        return Segment(
            name="feed",
            unit="block",
            parameters=names,
            forward=Pass(
                reads=(Argument("h2"),),
                writes=(Argument("f", layout=self.partial),),
                work=Work((*up_forward.ops, act_forward, *down_forward.ops)),
            ),
            backward=Pass(
                reads=(Argument("df") if self.drops else Argument("dx", next_block=True),),
                writes=(Argument("dh2", layout=self.partial),),
                work=Work((*down_backward.ops, act_backward, *up_backward.ops)),
                temporary_bytes=max(self.e * self.N * self.ft * (3 if self.model.gated else 1), self.narrow_feed_bytes(wide)),
            ),
            keeps=("h2",),
            saved=True,
            saving=Work((*up_forward.ops, act_forward)),
        )

    def narrow_feed_bytes(self, wide: int) -> Bytes:
        """The gradient of the inner activation together with the product of its weights, in bf16."""
        return self.e * wide * (self.N + self.h) if self.narrow else 0

    def add(self) -> Segment:
        size = self.U * self.h
        learns = self.model.bias
        return Segment(
            name="add",
            unit="block" if learns else None,
            parameters=("feed.bias",) if learns else (),
            forward=Pass(
                reads=(Argument("x2", layout=self.stream), Argument("f", layout=self.stream)),
                writes=(Argument("x", layout=self.stream, next_block=True),),
                work=Work((self.touch("add", 3 * size),)),
                temporary_bytes=self.drop,
            ),
            backward=Pass(
                reads=(Argument("dx", layout=self.stream, next_block=True),),
                writes=(Argument("df", layout=self.stream),) if self.drops else (),
                work=Work((self.touch("add", (2 if self.drops else 1) * size),)),
                temporary_bytes=self.drop,
            )
            if learns or self.drops
            else None,
        )

    def final(self) -> Segment:
        size = self.U * self.h
        return Segment(
            name="final",
            unit="head",
            parameters=tuple(one.name for one in self.norm_parameters("final")),
            forward=Pass(
                reads=(Argument("x", layout=self.stream),),
                writes=(Argument("h", layout=self.stream),),
                work=Work((self.touch("final", 2 * size),)),
            ),
            backward=Pass(
                reads=(Argument("dh", layout=self.stream),),
                writes=(Argument("dx", layout=self.stream),),
                work=Work((self.touch("final", 3 * size),)),
            ),
            keeps=("x",),
            saved=True,
        )

    def logits(self) -> Segment:
        forward, backward = self.linear("logits", self.N, self.h, self.Vt)
        return Segment(
            name="logits",
            unit="embed" if self.model.tied else "head",
            parameters=("embed.tokens",) if self.model.tied else ("head.weight",),
            forward=Pass(reads=(Argument("h"),), writes=(Argument("z", layout=self.feature),), work=forward),
            backward=Pass(
                reads=(Argument("dz", layout=self.feature),),
                writes=(Argument("dh", layout=self.partial),),
                work=backward,
                temporary_bytes=self.narrow_product_bytes(self.Vt * self.h),
            ),
            keeps=("h",),
        )

    def peak(self) -> Segment:
        layout = self.local.on_tensor(Partial("max"))
        work = Work((self.touch("peak", self.N * self.Vt),))
        return Segment(
            name="peak", forward=Pass(reads=(Argument("z", layout=self.feature),), writes=(Argument("m", layout=layout),), work=work)
        )

    def sums(self) -> Segment:
        logits = self.N * self.Vt
        chunk = self.w * min(self.N, CHUNK_ROWS) * self.Vt
        return Segment(
            name="sums",
            forward=Pass(
                reads=(Argument("z", layout=self.feature), Argument("m")),
                writes=(Argument("r", layout=self.partial),),
                work=Work((self.touch("sums", logits * (self.e + self.w), element_bytes=1),)),
                temporary_bytes=chunk + 9 * self.N,
            ),
            backward=Pass(
                reads=(Argument("dr"),),
                writes=(Argument("dz", layout=self.feature),),
                work=Work((self.touch("sums", logits * (2 * self.e + 2 * self.w), element_bytes=1),)),
                temporary_bytes=max((10 + self.w) * self.N, chunk + 9 * self.N if self.narrow else 0),
            ),
            keeps=("z", "m"),
        )

    def loss(self) -> Segment:
        work = Work((self.touch("loss", 3 * self.N, element_bytes=self.w),))
        return Segment(
            name="loss",
            forward=Pass(
                reads=(Argument("r"), Argument("m"), Argument("valid")),
                writes=(Argument("loss"),),
                work=work,
                temporary_bytes=(self.w + 1) * self.N,
            ),
            backward=Pass(reads=(Argument("valid"),), writes=(Argument("dr"),), work=work, temporary_bytes=self.N),
            keeps=("r",),
        )

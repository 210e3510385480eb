"""Model: the shape of a dense decoder, and how many parameters it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainwright.problems import Problem
from trainwright.spec.bounds import choice_problems, count_problems, range_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES: Final = ("decoder",)
NORMS: Final = ("rmsnorm", "layernorm")
POSITIONS: Final = ("rope", "learned")
ACTIVATIONS: Final = ("swiglu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Stretches the rotary frequencies, as Llama 3.1 does for long contexts.

    Frequencies whose wave length exceeds original_max_positions / low_freq_factor are divided by factor, those shorter than
    original_max_positions / high_freq_factor are kept, and those between are blended.

    Source: Llama 3.1 config.json, rope_type "llama3".
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense decoder: GPT-2 and GPT-3, Llama 1 to 3.

    Letters used in the formulas of the project: L num_layers, h width, H num_heads, K num_kv_heads, d head_width, f ffn_width, V vocab.

    activation   "swiglu" has gate and up; "gelu" is exact (erf), "gelu_tanh" the tanh form (Hugging Face calls it gelu_new).
    bias         every linear layer has one, and so has every layernorm. rmsnorm never has.
    tied         the head multiplies by the embedding table.
    dropout      after attention and after the feed-forward part, and on the embeddings. Attention weights are never dropped.
    """

    name: str
    family: str = "decoder"
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    vocab: int
    max_positions: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    positions: str = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    activation: str = "swiglu"
    bias: bool = False
    tied: bool = False
    dropout: float = 0.0
    source: str = ""

    @property
    def gated(self) -> bool:
        """The feed-forward part has a gate beside up."""
        return self.activation == "swiglu"

    @property
    def norm_bias(self) -> bool:
        """Norms add a bias."""
        return self.bias and self.norm == "layernorm"

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value matrix: (H + 2 K) d."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_width

    def check(self) -> Iterator[Problem]:
        """Every reason why this shape cannot be built."""
        sizes = list(_size_problems(self))
        yield from sizes
        yield from _choice_problems(self)
        yield from range_problems("model.norm_eps", self.norm_eps, least=0.0, suggestion=1e-5)
        yield from range_problems("model.rope_theta", self.rope_theta, least=0.0, suggestion=10_000.0, open_below=True)
        yield from range_problems("model.dropout", self.dropout, least=0.0, most=1.0, suggestion=0.0, open_above=True)
        if not sizes:
            yield from _head_problems(self)


def num_parameters(model: Model) -> int:
    """Count the trainable values, exactly; a tied head counts once.

    >>> shape = {"width": 4, "num_heads": 2, "num_kv_heads": 1, "head_width": 2, "ffn_width": 8, "vocab": 16, "max_positions": 8}
    >>> num_parameters(Model(name="m", num_layers=1, **shape))
    284
    """
    embed = model.vocab * model.width
    positions = model.max_positions * model.width if model.positions == "learned" else 0
    head = 0 if model.tied else embed
    return embed + positions + model.num_layers * block_parameters(model) + norm_parameters(model) + head


def block_parameters(model: Model) -> int:
    """Count the values of one block: two norms, query, key, value and out, up, down and the gate if there is one."""
    num_feed_inputs = 2 if model.gated else 1
    attention = model.qkv_width * model.width + model.width * model.num_heads * model.head_width
    feed = (num_feed_inputs + 1) * model.ffn_width * model.width
    biases = model.qkv_width + model.width + num_feed_inputs * model.ffn_width + model.width if model.bias else 0
    return 2 * norm_parameters(model) + attention + feed + biases


def norm_parameters(model: Model) -> int:
    """Count the values of one norm: a weight, and a bias where norms have one."""
    return model.width * (2 if model.norm_bias else 1)


SIZES: Final = ("num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab", "max_positions")


def _size_problems(model: Model) -> Iterator[Problem]:
    for name in SIZES:
        yield from count_problems(f"model.{name}", getattr(model, name))


def _choice_problems(model: Model) -> Iterator[Problem]:
    yield from choice_problems("model.family", model.family, FAMILIES)
    yield from choice_problems("model.norm", model.norm, NORMS)
    yield from choice_problems("model.positions", model.positions, POSITIONS)
    yield from choice_problems("model.activation", model.activation, ACTIVATIONS)


def _head_problems(model: Model) -> Iterator[Problem]:
    if model.num_heads % model.num_kv_heads:
        divisors = tuple(n for n in range(1, min(model.num_heads, 4096) + 1) if model.num_heads % n == 0)
        yield Problem(
            f"{model.num_kv_heads} key-value heads cannot be shared evenly by {model.num_heads} heads",
            path="model.num_kv_heads",
            given=model.num_kv_heads,
            allowed=divisors,
            attempt=f"model.num_kv_heads = {max(n for n in divisors if n <= max(model.num_kv_heads, 1))}",
        )
    if model.positions == "rope" and model.head_width % 2:
        yield Problem(
            f"rotary positions turn pairs of values, and the head width {model.head_width} is odd",
            path="model.head_width",
            given=model.head_width,
            allowed="even numbers",
            attempt=f"model.head_width = {model.head_width + 1}",
        )

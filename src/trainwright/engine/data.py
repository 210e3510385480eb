"""Real text as batches: which tokens a rank sees is a function of global numbers alone.

Glossary
    corpus     the text of all documents as tokens, some documents kept out of training for validation
    sequence   number i of the corpus: tokens i*s up to (i+1)*s + 1; the last is only a target
    place      where a sequence stands in its step: (microbatch * num_replicas + replica) * microbatch_sequences + its row
    replica    index of a rank among those that see different data (its coordinates on data and zero, flattened)
    epoch      one visit of every sequence, in an order that a keyed permutation gives
    cursor     how many sequences all steps before a given one have used: all that has to be saved

A change of the number of ranks, or of microbatches, moves sequences between ranks and leaves the set of each step as it was.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trainwright.engine.random import Key, integers
from trainwright.engine.tokenizer import ByteTokenizer, Tokenizer, Tokens
from trainwright.problems import PlanError, Problem
from trainwright.units import Bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IGNORED = -1
"""A target that no loss counts."""

STDLIB = "text:stdlib"
_WORD = (1 << 64) - 1
_NUM_ROUNDS = 4
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text as tokens. `unigram_entropy` is in nat per byte, over all of it: what a model knows that knows letter frequencies only."""

    name: str
    train: Tokens
    validation: Tokens
    vocab_size: int
    train_bytes: Bytes
    validation_bytes: Bytes
    unigram_entropy: float
    num_documents: int
    num_skipped: int = 0

    @property
    def train_bytes_per_token(self) -> float:
        """Bytes of text per token of training text: divides nat per token to give nat per byte."""
        return self.train_bytes / len(self.train)

    @property
    def validation_bytes_per_token(self) -> float:
        """Bytes of text per token of validation text."""
        return self.validation_bytes / len(self.validation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One microbatch of one replica: `tokens` and `targets` [b, s] int64; row r is the step's sequence `first_sequence` + r."""

    tokens: Tensor
    targets: Tensor
    first_sequence: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """All steps before `step` have used `num_sequences` sequences."""

    step: int = 0
    num_sequences: int = 0


class Batches(Protocol):
    """Where a run gets its tokens."""

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        """The batch of one replica."""

    def global_batch(self, step: int) -> Batch:
        """All sequences of a step, in the order of their places."""

    def num_valid_tokens(self, step: int) -> int:
        """Targets of the whole step that are not ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Sequences of a tokenised text, each once an epoch.

    With `shuffled` the order of an epoch is a permutation keyed by seed and epoch, else that of the text. `start` resumes: batches
    may have had another size before it.
    """

    text: Tokens
    sequence_tokens: int
    global_sequences: int
    num_replicas: int = 1
    microbatch_sequences: int = 1
    seed: int = 0
    shuffled: bool = True
    start: Cursor = field(default_factory=Cursor)

    @property
    def num_sequences(self) -> int:
        """Sequences in the text; the rest of it, shorter than one, is left out."""
        return (len(self.text) - 1) // self.sequence_tokens

    def cursor(self, step: int) -> Cursor:
        """Where the feed stands before `step`."""
        return Cursor(step, self.start.num_sequences + (step - self.start.step) * self.global_sequences)

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        """The microbatch of one replica: next tokens are the targets."""
        first = (microbatch * self.num_replicas + replica) * self.microbatch_sequences
        return self._rows(step, first, self.microbatch_sequences)

    def global_batch(self, step: int) -> Batch:
        """All sequences of the step."""
        return self._rows(step, 0, self.global_sequences)

    def num_valid_tokens(self, step: int) -> int:  # noqa: ARG002 - every step of text is full
        """Every target counts."""
        return self.global_sequences * self.sequence_tokens

    def sequences(self, step: int, first: int, count: int) -> list[int]:
        """The numbers of the sequences at places first ... first + count - 1 of the step."""
        begin = self.cursor(step).num_sequences + first
        return [self._sequence(used) for used in range(begin, begin + count)]

    def _sequence(self, used: int) -> int:
        epoch, place = divmod(used, self.num_sequences)
        return permuted(place, self.num_sequences, Key.of(self.seed, epoch, "order of the corpus")) if self.shuffled else place

    def _rows(self, step: int, first: int, count: int) -> Batch:
        length = self.sequence_tokens
        begins = (number * length for number in self.sequences(step, first, count))
        rows = np.stack([self.text[begin : begin + length + 1] for begin in begins]).astype(np.int64)
        both = torch.from_numpy(rows)
        return Batch(tokens=both[:, :-1].contiguous(), targets=both[:, 1:].contiguous(), first_sequence=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedFeed:
    """Random tokens in sequences of unequal lengths, for proofs: beyond its length a sequence is padding, ignored by the loss.

    The step's sequence at place p has `lengths[p % len(lengths)]` targets, each between 0 and `sequence_tokens`; none given: all full.
    """

    vocab_size: int
    sequence_tokens: int
    global_sequences: int
    num_replicas: int = 1
    microbatch_sequences: int = 1
    seed: int = 0
    lengths: tuple[int, ...] = ()

    def batch(self, step: int, replica: int, microbatch: int) -> Batch:
        """The microbatch of one replica."""
        first = (microbatch * self.num_replicas + replica) * self.microbatch_sequences
        return self._rows(step, first, self.microbatch_sequences)

    def global_batch(self, step: int) -> Batch:
        """All sequences of the step."""
        return self._rows(step, 0, self.global_sequences)

    def num_valid_tokens(self, step: int) -> int:  # noqa: ARG002 - every step has the same lengths
        """Targets that are not padding."""
        return sum(self._length(place) for place in range(self.global_sequences))

    def _length(self, place: int) -> int:
        return self.lengths[place % len(self.lengths)] if self.lengths else self.sequence_tokens

    def _rows(self, step: int, first: int, count: int) -> Batch:
        places = torch.arange(first, first + count, dtype=torch.int64)
        across = torch.arange(self.sequence_tokens + 1, dtype=torch.int64)
        indices = places[:, None] * (self.sequence_tokens + 1) + across
        both = integers(Key.of(self.seed, step, "tokens of the proof"), indices, self.vocab_size)
        lengths = torch.tensor([self._length(place) for place in places.tolist()], dtype=torch.int64)
        is_padding = across[None, :-1] >= lengths[:, None]
        return Batch(tokens=both[:, :-1].contiguous(), targets=both[:, 1:].masked_fill(is_padding, IGNORED), first_sequence=first)


def padded_batch(seed: int, lengths: Sequence[int], sequence_tokens: int, vocab_size: int) -> Batch:
    """One batch of random tokens, row r with `lengths[r]` targets, the others ignored."""
    feed = PaddedFeed(
        vocab_size=vocab_size, sequence_tokens=sequence_tokens, global_sequences=len(lengths), seed=seed, lengths=tuple(lengths)
    )
    return feed.global_batch(0)


def permuted(place: int, count: int, key: Key) -> int:
    """Where a keyed permutation of 0 ... count - 1 takes `place`, without a table of all of them.

    A Feistel network of four rounds over the next even number of bits; what falls outside goes round again until it falls inside.
    Sources: Luby and Rackoff 1988, "How to Construct Pseudorandom Permutations"; Black and Rogaway 2002, "Ciphers with Arbitrary
    Finite Domains".
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_NUM_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix((key.first + number * key.second) & _WORD)) & mask)
        place = left << half | right
        if place < count:
            return place


def _mix(word: int) -> int:
    """SplitMix64's finaliser; see `random` for its source."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31


def unigram_entropy(text: bytes | Tokens) -> float:
    """Entropy of the frequencies of single bytes, in nat per byte.

    >>> round(unigram_entropy(b"abab"), 4)
    0.6931
    """
    counts = np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def load_corpus(
    data: str,
    *,
    sequence_tokens: int,
    validation_fraction: float = 0.05,
    tokenizer: Tokenizer | None = None,
    folder: Path | None = None,
) -> Corpus:
    """Read what `run.data` names: "text:stdlib", or "text:PATH" with a file or folder, relative to `folder`.

    A folder means all its UTF-8 files, in the order of their names; hidden, binary and empty ones are skipped. Raises PlanError for a
    corpus that cannot be read or that is shorter than one sequence.
    """
    documents, num_skipped = _read(data, folder or Path())
    if not documents:
        raise PlanError(Problem("the corpus holds no text", path="run.data", given=data, allowed="at least one UTF-8 text file"))
    tokenizer = tokenizer or ByteTokenizer()
    train, held_out = _split(documents, validation_fraction)
    corpus = Corpus(
        name=data,
        train=tokenizer.encode(train),
        validation=tokenizer.encode(held_out),
        vocab_size=tokenizer.vocab_size,
        train_bytes=sum(map(len, train)),
        validation_bytes=sum(map(len, held_out)),
        unigram_entropy=unigram_entropy(b"".join((*train, *held_out))),
        num_documents=len(documents),
        num_skipped=num_skipped,
    )
    if problems := tuple(_too_short(corpus, sequence_tokens, validation_fraction)):
        raise PlanError(problems)
    return corpus


def _too_short(corpus: Corpus, sequence_tokens: int, validation_fraction: float) -> Iterator[Problem]:
    for part, text in (("training", corpus.train), ("validation", corpus.validation)):
        if part == "validation" and not validation_fraction:
            continue
        if len(text) < sequence_tokens + 1:
            yield Problem(
                f"the {part} text is shorter than one sequence",
                path="run.data",
                given=corpus.name,
                allowed=f"at least {sequence_tokens + 1} tokens; there are {len(text)}",
                attempt="more text, a smaller batch.sequence_tokens" + (", or run.validation_fraction = 0" if part == "validation" else ""),
            )


def _read(data: str, folder: Path) -> tuple[dict[str, bytes], int]:
    """The text of each document by its name, in order, and how many files were skipped."""
    if data == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return _read_files(root, (path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts)), data)
    path = folder / data.removeprefix("text:")
    try:
        if path.is_dir():
            return _read_files(path, (found for found in path.rglob("*") if not _is_hidden(found.relative_to(path))), data)
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(data, error) from None
    if not _is_text(content):
        raise PlanError(Problem("the corpus is not UTF-8 text", path="run.data", given=data, allowed="a text file, or a folder of them"))
    return ({path.name: content} if content else {}), 0


def _read_files(root: Path, paths: Iterator[Path], data: str) -> tuple[dict[str, bytes], int]:
    documents: dict[str, bytes] = {}
    num_skipped = 0
    try:
        for path in sorted(paths, key=lambda found: found.relative_to(root).as_posix()):
            if not path.is_file():
                continue
            content = path.read_bytes()
            if content and _is_text(content):
                documents[path.relative_to(root).as_posix()] = content
            else:
                num_skipped += 1
    except OSError as error:
        raise _unreadable(data, error) from None
    return documents, num_skipped


def _unreadable(data: str, error: OSError) -> PlanError:
    problem = Problem(
        f"the corpus cannot be read: {error.strerror or error}",
        path="run.data",
        given=data,
        allowed="text:stdlib, or text: and a readable file or folder",
        attempt='run.data = "text:stdlib"',
    )
    return PlanError(problem)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _split(documents: dict[str, bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Training and validation documents.

    Whole documents are kept out, in the order of a checksum of their names, as long as they fit into the fraction. Where documents are too
    few or too large for that, the end of the text is kept out.
    """
    if not fraction:
        return list(documents.values()), []
    total = sum(map(len, documents.values()))
    names: set[str] = set()
    held_out = 0
    for name in sorted(documents, key=lambda name: (zlib.crc32(name.encode(errors="surrogateescape")), name)):
        if held_out + len(documents[name]) <= fraction * total:
            names.add(name)
            held_out += len(documents[name])
    if held_out >= fraction * total / 2:
        return [text for name, text in documents.items() if name not in names], [documents[name] for name in documents if name in names]
    return _cut(list(documents.values()), total - round(fraction * total))


def _cut(texts: list[bytes], length: int) -> tuple[list[bytes], list[bytes]]:
    """Cut a row of documents after `length` bytes, moved to where a character begins."""
    before: list[bytes] = []
    for number, text in enumerate(texts):
        if len(text) > length:
            while length > 0 and text[length] & 0xC0 == 0x80:
                length -= 1
            parts = ([text[:length]] if length else []), [text[length:]]
            return before + parts[0], parts[1] + texts[number + 1 :]
        before.append(text)
        length -= len(text)
    return before, []

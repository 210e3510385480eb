"""Text to tokens: bytes as they are, or a `tokenizer.json` as Hugging Face's tokenizers write it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.problems import PlanError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Tokens = NDArray[Any]

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What a corpus needs: numbers below `vocab_size` for the text of documents."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """The tokens of all documents, one after another, each ended by the end token if there is one."""

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, as far as they make text."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; byte 0, which no text holds, ends a document."""

    vocab_size: int = 256

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """The bytes, uint8."""
        return np.frombuffer(b"".join(document + b"\0" for document in documents), dtype=np.uint8)

    def decode(self, tokens: Tokens) -> str:
        """The text; what is no UTF-8 shows as a replacement character."""
        return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A trained tokenizer (byte-pair encoding and others), run by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json; a PlanError says why it cannot be read."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive a fork
        try:
            library = import_module("tokenizers")
        except ImportError:
            raise PlanError(
                Problem(
                    "a tokenizer.json is read by the library `tokenizers`, which is not installed",
                    path="run.tokenizer",
                    given=str(path),
                    attempt='pip install "trainwright[run]", or leave run.tokenizer out: bytes are the tokens then',
                )
            ) from None
        try:
            self._tokenizer = library.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions
            raise PlanError(
                Problem(f"the tokenizer cannot be read: {error}", path="run.tokenizer", given=str(path), allowed="a tokenizer.json")
            ) from None
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        ends = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        self._end = next((end for end in ends if end is not None), None)

    def encode(self, documents: Sequence[bytes]) -> Tokens:
        """The tokens, int32."""
        texts = [document.decode("utf-8") for document in documents]
        end = [] if self._end is None else [self._end]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        pieces = [np.asarray([*encoding.ids, *end], dtype=np.int32) for encoding in encodings]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)

    def decode(self, tokens: Tokens) -> str:
        """The text."""
        return str(self._tokenizer.decode(tokens.tolist()))

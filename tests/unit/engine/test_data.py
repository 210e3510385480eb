import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.engine.data import IGNORED, Cursor, Feed, PaddedFeed, load_corpus, padded_batch, permuted, unigram_entropy
from trainwright.engine.random import Key
from trainwright.engine.tokenizer import ByteTokenizer, FileTokenizer
from trainwright.problems import PlanError


def text(num_sequences, length):
    """Tokens that tell their place."""
    return np.arange(num_sequences * length + 1, dtype=np.int32)


@given(count=st.integers(1, 300), seed=st.integers(0, 5))
def test_the_order_of_an_epoch_is_a_permutation(count, seed):
    """Every place is taken once."""
    key = Key.of(seed, 0, "order")

    assert list(range(count)) == sorted(permuted(place, count, key) for place in range(count))


def test_epochs_and_seeds_shuffle_differently():
    """A hundred sequences in one order twice would be no accident."""
    orders = {tuple(permuted(place, 100, Key.of(seed, epoch, "order")) for place in range(100)) for seed in range(3) for epoch in range(3)}

    assert len(orders) == 9
    assert tuple(range(100)) not in orders


@pytest.mark.parametrize(("num_replicas", "microbatch_sequences"), [(1, 1), (1, 12), (2, 3), (3, 2), (3, 4), (6, 1)])
def test_every_sequence_comes_once_an_epoch_on_any_number_of_ranks(num_replicas, microbatch_sequences):
    """31 sequences, 12 a step: two and a half steps an epoch; ids of 31 steps are 12 whole epochs."""
    feed = Feed(
        text=text(31, 8),
        sequence_tokens=8,
        global_sequences=12,
        num_replicas=num_replicas,
        microbatch_sequences=microbatch_sequences,
        seed=3,
    )
    num_microbatches = 12 // num_replicas // microbatch_sequences
    seen = []
    for step in range(31):
        batches = [feed.batch(step, replica, microbatch) for microbatch in range(num_microbatches) for replica in range(num_replicas)]
        seen.append(torch.cat([batch.tokens for batch in batches]))
        assert [batch.first_sequence for batch in batches] == list(range(0, 12, microbatch_sequences))
        assert torch.equal(feed.global_batch(step).tokens, seen[-1]), "the set of a step, and its order by place, is the same on every mesh"
    ids = (torch.cat(seen)[:, 0] // 8).tolist()

    for epoch in range(12):
        assert list(range(31)) == sorted(ids[epoch * 31 : (epoch + 1) * 31])


def test_targets_are_the_next_tokens():
    """The last target of a sequence is the first token of the one behind it."""
    batch = Feed(text=text(4, 8), sequence_tokens=8, global_sequences=4).global_batch(0)

    assert torch.int64 == batch.tokens.dtype == batch.targets.dtype
    assert torch.equal(batch.tokens + 1, batch.targets)
    assert batch.tokens.is_contiguous()
    assert batch.targets.is_contiguous()


def test_a_resumed_feed_goes_on_where_it_stopped_though_the_batch_has_changed():
    """30 consumed, 10 more, then resumed again on other ranks: the next id is number 40."""
    whole = Feed(text=text(97, 4), sequence_tokens=4, global_sequences=1)
    first = Feed(text=text(97, 4), sequence_tokens=4, global_sequences=6)
    second = Feed(text=text(97, 4), sequence_tokens=4, global_sequences=10, num_replicas=2, start=first.cursor(5))
    third = Feed(text=text(97, 4), sequence_tokens=4, global_sequences=3, num_replicas=3, start=second.cursor(6))

    assert Cursor(6, 40) == second.cursor(6)
    assert whole.sequences(40, 0, 1) == third.sequences(6, 0, 1)
    assert [whole.sequences(used, 0, 1)[0] for used in range(30, 40)] == second.sequences(5, 0, 10)


def test_padding_is_ignored_and_counted_out():
    """Rows of 3, 8 and 0 targets."""
    batch = padded_batch(seed=0, lengths=(3, 8, 0), sequence_tokens=8, vocab_size=11)

    assert [3, 8, 0] == (batch.targets != IGNORED).sum(1).tolist()
    assert torch.equal(batch.tokens[:, 1:][batch.targets[:, :-1] != IGNORED], batch.targets[:, :-1][batch.targets[:, :-1] != IGNORED])
    assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < 11


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_padded_batches_do_not_depend_on_the_mesh(num_replicas):
    """Rows by place in the step; valid targets counted over all ranks."""
    feed = PaddedFeed(vocab_size=50, sequence_tokens=5, global_sequences=6, num_replicas=num_replicas, lengths=(5, 2, 0, 4))
    whole = feed.global_batch(2)
    parts = [feed.batch(2, replica, microbatch) for microbatch in range(6 // num_replicas) for replica in range(num_replicas)]

    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))
    assert feed.num_valid_tokens(2) == int((whole.targets != IGNORED).sum()) == 5 + 2 + 0 + 4 + 5 + 2


def corpus_folder(tmp_path, num_documents=60):
    for number in range(num_documents):
        folder = tmp_path / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"doc{number:02}.txt").write_text(f"document {number}: größer " * 20, encoding="utf-8")
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def test_whole_documents_are_held_out(tmp_path):
    """No document is on both sides; about the fraction is held out; reading twice gives the same."""
    corpus_folder(tmp_path)
    corpus = load_corpus(f"text:{tmp_path}", sequence_tokens=16, validation_fraction=0.1)
    train, held_out = (ByteTokenizer().decode(part).split("\0")[:-1] for part in (corpus.train, corpus.validation))

    assert (60, 2) == (corpus.num_documents, corpus.num_skipped)
    assert 60 == len(train) + len(held_out)
    assert not set(train) & set(held_out)
    assert 0.05 <= corpus.validation_bytes / (corpus.train_bytes + corpus.validation_bytes) <= 0.1
    again = load_corpus(tmp_path.name.join(["text:", ""]), folder=tmp_path.parent, sequence_tokens=16, validation_fraction=0.1)
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.validation, again.validation)


def test_a_single_file_is_cut_at_a_character(tmp_path):
    """The end of it is held out, and both parts are text."""
    (tmp_path / "one.txt").write_text("ä" * 1_001, encoding="utf-8")
    corpus = load_corpus("text:one.txt", folder=tmp_path, sequence_tokens=16, validation_fraction=0.25)

    assert (1_502, 500) == (corpus.train_bytes, corpus.validation_bytes)
    assert "\N{REPLACEMENT CHARACTER}" not in ByteTokenizer().decode(corpus.train) + ByteTokenizer().decode(corpus.validation)


def test_the_standard_library_is_a_corpus_on_every_machine():
    """Megabytes of real text; bytes of source code hold between 3 and 3.5 nat on their own."""
    corpus = load_corpus("text:stdlib", sequence_tokens=256)

    assert corpus.num_documents > 300
    assert corpus.train_bytes > 5_000_000
    assert 3.0 < corpus.unigram_entropy < 3.5
    assert 0.04 < corpus.validation_bytes / (corpus.train_bytes + corpus.validation_bytes) <= 0.05
    assert 256 == corpus.vocab_size
    assert "import" in ByteTokenizer().decode(corpus.validation)


def test_the_unigram_entropy_of_equal_letters_is_the_logarithm_of_their_number():
    """Four letters: log 4."""
    assert math.log(4) == pytest.approx(unigram_entropy(b"abcd" * 7), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot be read: No such file"),
        ("empty.txt", "holds no text"),
        ("nothing", "holds no text"),
        ("picture.bin", "not UTF-8 text"),
        ("short.txt", "training text is shorter than one sequence"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_a_problem(tmp_path, name, message):
    """Each says what was given and what to try."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(PlanError, match=message) as caught:
        load_corpus(f"text:{name}", folder=tmp_path, sequence_tokens=16)

    assert {("run.data", f"text:{name}")} == {(problem.path, problem.given) for problem in caught.value.problems}


def test_a_tokenizer_file_makes_the_tokens(tmp_path):
    """Byte-pair encoding as the `tokenizers` library reads it; documents are ended by the end token."""
    pytest.importorskip("tokenizers")
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = FileTokenizer(path)

    assert 4 == tokenizer.vocab_size
    assert [3, 1, 0, 2, 0] == tokenizer.encode([b"aba", b"b"]).tolist()


def test_a_tokenizer_that_cannot_be_read_is_a_problem(tmp_path):
    """Whether the library is missing or the file is broken, the path is named."""
    path = tmp_path / "tokenizer.json"
    path.write_text("no json")
    with pytest.raises(PlanError) as caught:
        FileTokenizer(path)

    assert "run.tokenizer" == caught.value.problems[0].path

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.engine.random import Key, Piece, bits, dropout_mask, init_parameter, integers, normal, uniform

WORD = (1 << 64) - 1
N = 200_000


def splitmix(word):
    """SplitMix64's finaliser in Python's own whole numbers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def test_the_finaliser_is_splitmix64():
    """The first outputs of the published generator from state 0: increment, then mix."""
    state, found = 0, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        found.append(splitmix(state))

    assert [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F] == found


@given(first=st.integers(0, WORD), second=st.integers(0, WORD), index=st.integers(0, 1 << 62))
def test_bits_are_two_rounds_of_the_finaliser(first, second, index):
    """int64 arithmetic in torch gives the bits that unsigned arithmetic gives."""
    expected = splitmix((splitmix((index * 0x9E3779B97F4A7C15 + first) & WORD) + second) & WORD)
    key = Key(first - (1 << 64) if first >> 63 else first, second - (1 << 64) if second >> 63 else second)

    assert expected == int(bits(key, torch.tensor([index]))[0]) & WORD


@st.composite
def pieces(draw):
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Piece(global_shape=shape, offsets=offsets, shape=extent)


@given(piece=pieces())
def test_a_piece_holds_the_numbers_of_the_whole(piece):
    """However a tensor is cut, an element's number is the same, to the bit."""
    box = tuple(slice(offset, offset + extent) for offset, extent in zip(piece.offsets, piece.shape, strict=True))
    key = Key.of(1, 2, "b3.attend")
    whole = Piece.whole(piece.global_shape)

    for draw in (uniform, normal, bits):
        assert torch.equal(draw(key, whole.indices())[box], draw(key, piece.indices()))
    assert torch.equal(dropout_mask(key, whole, 0.3, torch.float32)[box], dropout_mask(key, piece, 0.3, torch.float32))
    for dtype in (torch.float64, torch.bfloat16):
        expected = init_parameter("w", whole, kind="normal", dtype=dtype)[box]
        assert torch.equal(expected, init_parameter("w", piece, kind="normal", dtype=dtype))


def test_slabs_do_not_show():
    """A tensor larger than one slab has the numbers that its indices have."""
    piece = Piece(global_shape=(700, 300), offsets=(13, 7), shape=(650, 290))

    assert torch.equal(
        normal(Key.of(5, 0, "init/w"), piece.indices()) * 0.02, init_parameter("w", piece, kind="normal", seed=5, dtype=torch.float64)
    )


def test_uniform_numbers_look_uniform():
    """Mean, variance and neighbours, each within five standard errors."""
    drawn = uniform(Key.of(0, 0, "u"), torch.arange(N))

    assert 0.0 <= float(drawn.min()) < float(drawn.max()) < 1.0
    assert abs(float(drawn.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / N)
    assert abs(float(drawn.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
    assert abs(float(((drawn[1:] - 0.5) * (drawn[:-1] - 0.5)).mean())) < 5 / 12 / math.sqrt(N)
    counts = torch.histc(drawn, bins=100, min=0, max=1)
    assert float(((counts - N / 100) ** 2 / (N / 100)).sum()) < 99 + 5 * math.sqrt(2 * 99), "chi squared with 99 degrees of freedom"


def test_every_bit_is_set_half_of_the_time():
    """No bit is stuck."""
    drawn = bits(Key.of(0, 0, "bits"), torch.arange(N))

    for place in range(64):
        share = float(((drawn >> place) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(N)


def test_normal_numbers_look_normal():
    """The first four moments, each within five standard errors."""
    drawn = normal(Key.of(0, 0, "n"), torch.arange(N))

    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((drawn**power).mean()) - expected) < 5 * math.sqrt(variance / N)


@pytest.mark.parametrize("other", [(1, 0, "a"), (0, 1, "a"), (0, 0, "b")])
def test_other_words_give_other_numbers(other):
    """Seed, step and site each matter, and the sequences are not correlated."""
    one, two = uniform(Key.of(0, 0, "a"), torch.arange(N)), uniform(Key.of(*other), torch.arange(N))

    assert abs(float(((one - 0.5) * (two - 0.5)).mean())) < 5 / 12 / math.sqrt(N)


def test_dropout_drops_its_share_and_keeps_the_mean():
    """Kept elements are scaled, so that the expected value does not change."""
    mask = dropout_mask(Key.of(0, 0, "d"), Piece.whole((400, 500)), 0.25, torch.float64)

    assert {0.0, 1 / 0.75} == set(mask.unique().tolist())
    assert abs(float((mask == 0).double().mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / mask.numel())


def test_integers_cover_their_range():
    """All values come up, none beyond the bound."""
    drawn = integers(Key.of(0, 0, "i"), torch.arange(10_000), 11)

    assert list(range(11)) == drawn.unique().tolist()


def test_initial_values_are_of_their_kind():
    """Ones, zeros, or of the deviation that was asked for."""
    piece = Piece.whole((300, 200))

    assert init_parameter("g", piece, kind="ones").eq(1).all()
    assert init_parameter("b", piece, kind="zeros").eq(0).all()
    assert float(init_parameter("w", piece, kind="normal", std=0.05).std()) == pytest.approx(0.05, rel=0.02)
    with pytest.raises(ValueError, match="unknown kind"):
        init_parameter("w", piece, kind="strange")


def test_the_default_generator_is_left_alone():
    """Threads as ranks share it: nothing here may read or move it."""
    before = torch.get_rng_state()
    normal(Key.of(0, 0, "n"), torch.arange(10))
    dropout_mask(Key.of(0, 0, "n"), Piece.whole((10,)), 0.5, torch.float32)

    assert torch.equal(before, torch.get_rng_state())

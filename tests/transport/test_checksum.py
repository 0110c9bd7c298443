import torch
from hypothesis import assume, given, strategies as st

from roundelay.transport.checksum import checksum

WORDS = 2048  # in a row


def words(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (rows * WORDS,), dtype=torch.int64, generator=generator)


def sum_of(values):
    return checksum(values.view(torch.uint8))


@given(st.integers(1, 3), st.integers(0, 3 * WORDS), st.integers(1, 2**64 - 1))
def test_every_change_of_one_word_is_found(rows, position, change):
    values = words(rows)
    before = sum_of(values)
    values[position % len(values)] += change if change < 2**63 else change - 2**64
    assert sum_of(values) != before


@given(st.integers(0, WORDS - 1), st.integers(0, WORDS - 1), st.integers(0, 63))
def test_a_bit_that_flips_in_two_rows_is_found(first, second, bit):
    values = words(2)
    before = sum_of(values)
    values[[first, WORDS + second]] ^= 1 << bit if bit < 63 else -(2**63)
    assert sum_of(values) != before


@given(st.integers(0, 3), st.integers(0, 3))
def test_rows_in_each_others_place_are_found(a, b):
    assume(a != b)
    values = words(4).view(4, WORDS)
    before = sum_of(values.flatten())
    values[[a, b]] = values[[b, a]]
    assert sum_of(values.flatten()) != before


def test_bytes_that_have_moved_or_are_missing_are_found():
    values = words(4).view(torch.uint8)
    altered = [values.roll(1), values.roll(8), values.roll(2**14), values[:-1], values[: -(2**14)], values[:0]]
    assert len({checksum(each) for each in [values, *altered]}) == len(altered) + 1


@given(st.binary(min_size=1, max_size=9000) | st.just(bytes(2**15 + 5)), st.data())
def test_every_flipped_bit_is_found_whatever_the_size(data, draw):
    values = torch.tensor(list(data), dtype=torch.uint8)
    before = checksum(values)
    values[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert checksum(values) != before


def test_equal_bytes_have_equal_sums_wherever_they_lie():
    values = words(2).view(torch.uint8)
    shifted = torch.empty(values.nbytes + 3, dtype=torch.uint8)
    shifted[3:] = values
    assert checksum(shifted[3:]) == checksum(values)

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings, strategies as st

from roundelay.chunks import Chunks
from roundelay.training.data import Draw, Draws, EqualDraws, SharedDraws, StaticShare, batches
from roundelay.training.tiny import Digits, DigitsConfig


class Counted(Draws):
    """Draws 0, 1, 2, ..."""

    def __init__(self, total: int) -> None:
        self._left = iter(range(total))

    def next(self) -> Draw | None:
        number = next(self._left, None)
        return None if number is None else Draw(number, number)


class EchoTask:
    """A batch is its samples and a random number."""

    seed = 3

    def batch(self, samples, generator):
        return torch.tensor(samples), torch.rand((), generator=generator)


@given(samples=st.integers(1, 500), chunk=st.integers(1, 80), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_epoch_has_every_sample_once_in_chunks_equally_large_to_within_one(samples, chunk, seed, epoch):
    chunks = Chunks(samples, chunk, seed)
    parts = [chunks.samples(epoch * chunks.per_epoch + index) for index in range(chunks.per_epoch)]
    assert sorted(sample for part in parts for sample in part) == list(range(samples))
    sizes = {len(part) for part in parts}
    assert max(sizes) <= chunk
    assert max(sizes) - min(sizes) <= 1


@given(samples=st.integers(8, 300), members=st.integers(1, 4), number=st.integers(0, 50))
def test_members_share_a_chunk(samples, members, number):
    chunks = Chunks(samples, 4 * members, seed=0)
    shares = [chunks.samples(number, member, members) for member in range(members)]
    assert sorted(sample for share in shares for sample in share) == sorted(chunks.samples(number))


@given(samples=st.integers(1, 300), chunk=st.integers(1, 40), number=st.integers(0, 100))
def test_samples_before_a_chunk_are_those_of_the_earlier_chunks(samples, chunk, number):
    chunks = Chunks(samples, chunk, seed=0)
    assert chunks.samples_before(number) == sum(len(chunks.samples(before)) for before in range(number))


def test_epochs_are_shuffled_differently_and_seeds_matter():
    chunks = Chunks(100, 100, seed=0)
    assert chunks.samples(0) != chunks.samples(1)
    assert chunks.samples(0) != Chunks(100, 100, seed=1).samples(0)
    assert chunks.samples(0) == Chunks(100, 100, seed=0).samples(0)


@given(groups=st.integers(1, 6), total=st.integers(0, 60), start=st.integers(0, 20), done=st.integers(0, 5))
def test_equal_draws_of_all_groups_are_every_chunk_once(groups, total, start, done):
    drawn = [d.chunk for group in range(groups) for d in EqualDraws(group, groups, total, start=start, done=done)]
    assert sorted(drawn) == list(range(start + done * groups, max(total, start + done * groups)))


class LocalCursor:
    """The cursor of a rendezvous, without a socket."""

    def __init__(self, total: int) -> None:
        from roundelay.cluster.rendezvous.cursor import Cursor

        self.cursor = Cursor(total)

    def draw(self, group: int, index: int, done: int, *, patient: bool = False) -> int | None:
        return self.cursor.draw(group, index)


@settings(max_examples=30)
@given(order=st.lists(st.integers(0, 2), min_size=40, max_size=80), total=st.integers(0, 30))
def test_dynamic_draws_use_every_chunk_once_in_whatever_order_learners_come(order, total):
    cursor = LocalCursor(total)
    draws = [SharedDraws(cursor, group, lambda: 0, None) for group in range(3)]
    drawn = [draws[group].next() for group in order]
    chunks = Counter(d.chunk for d in drawn if d is not None)
    assert chunks == Counter(range(total))


def test_static_shares_stay_apart_and_a_fast_learner_gets_further():
    cursor = LocalCursor(6)
    fast, slow = (SharedDraws(cursor, group, lambda: 0, StaticShare(group, 2, 0)) for group in range(2))
    got = [fast.next(), fast.next(), slow.next(), fast.next(), fast.next(), slow.next(), fast.next()]
    assert [d.chunk for d in got[:6] if d] == [0, 2, 1, 4, 6, 3]
    assert [d.number for d in got[:6] if d] == list(range(6))
    assert got[6] is None


def test_a_batch_does_not_depend_on_the_process_that_prepares_it():
    task, chunks = Digits(DigitsConfig(), seed=0), Chunks(20, 4, seed=0)
    here, there = (batches(task, chunks, Counted(5), member=0, members=1, workers=workers) for workers in (0, 1))
    for (draw, size, mine), (other, other_size, theirs) in zip(here, there, strict=True):
        assert (draw, size) == (other, other_size)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def test_what_is_random_in_a_batch_comes_from_its_chunk():
    def randoms(numbers):
        chunks = Chunks(20, 4, seed=0)
        drawn = batches(EchoTask(), chunks, Counted(numbers), member=0, members=1, workers=0)
        return [float(batch[1]) for _, _, batch in drawn]

    assert randoms(5) == randoms(5)
    assert randoms(3) == randoms(5)[:3]
    assert len(set(randoms(5))) == 5


def test_the_loader_leaves_the_random_state_of_training_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(batches(EchoTask(), Chunks(20, 4, seed=0), Counted(5), member=0, members=1, workers=0))
    assert torch.equal(torch.rand(3), expected)

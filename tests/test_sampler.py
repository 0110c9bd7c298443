"""ElasticSampler: every sample once an epoch, whatever happens to learners; exact resume; in a DataLoader with workers."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from roundelay import ADPSGD, ElasticSampler, Learner, Rendezvous, World, join
from roundelay.errors import ConfigError, DroppedError


class Numbers(torch.utils.data.Dataset):
    """Sample k is the number k, so that a loop sees which samples it uses."""

    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return index


def alone(*, rank=0, size=1):
    return World(rank, size, 0, 1)


def test_one_learner_uses_every_sample_once_an_epoch_in_the_order_of_the_seed():
    sampler = ElasticSampler(10, 4, epochs=2, seed=3, world=alone())
    epochs = {epoch: [index for batch in sampler for index in batch] for epoch in sampler.remaining_epochs()}
    assert [sorted(indices) for indices in epochs.values()] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    same = ElasticSampler(10, 4, epochs=2, seed=3, world=alone())
    assert [index for batch in same for index in batch] == epochs[0]
    assert len(sampler) == 3


def test_in_a_world_of_fixed_size_the_ranks_share_the_batches():
    samplers = [ElasticSampler(64, 4, epochs=1, world=alone(rank=rank, size=3)) for rank in range(3)]
    parts = [[index for batch in sampler for index in batch] for sampler in samplers]
    assert sorted(index for part in parts for index in part) == list(range(64))
    assert all(len(sampler) == 6 for sampler in samplers)


def test_a_resumed_sampler_continues_after_the_batches_of_the_steps_taken():
    world = alone()
    sampler = ElasticSampler(12, 2, epochs=1, world=world)
    batches = iter(sampler)
    first = [next(batches) for _ in range(3)]
    world.steps.taken += 2  # of the third batch the step was not taken yet
    later = ElasticSampler(12, 2, epochs=1, world=alone())
    later.load_state_dict(sampler.state_dict())
    assert list(later) == [first[2], *batches]
    with pytest.raises(ConfigError, match="before its first batch"):
        sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match="another number of batches"):
        ElasticSampler(13, 2, epochs=1, world=alone()).load_state_dict(sampler.state_dict())


def test_a_loop_that_counts_epochs_itself_gets_no_batches_of_later_epochs():
    sampler = ElasticSampler(10, 4, epochs=4, world=alone())
    parts = []
    for epoch in (0, 0, 2, 3):  # this learner was so slow that it has missed the beginning of epoch 2
        sampler.set_epoch(epoch)
        parts.append(sorted(index for batch in sampler for index in batch))
    assert parts == [list(range(10)), [], sorted(2 * list(range(10))), list(range(10))]


def test_batches_that_were_drawn_and_not_used_come_first_in_the_next_epoch():
    world = alone()
    sampler = ElasticSampler(12, 2, epochs=1, world=world)
    seen = []
    for epoch in sampler.remaining_epochs():
        assert epoch == 0
        for batch in sampler:
            if len(seen) == 2 and batch not in seen:
                seen.append(None)  # the loop is left before the step of this batch
                break
            seen.append(batch)
            world.steps.taken += 1
    used = [index for batch in seen if batch for index in batch]
    assert sorted(used) == list(range(12))


@pytest.mark.parametrize(("name", "arguments"), [("dataset", (0, 1)), ("batch_size", (4, 0)), ("epochs", (4, 1, 0))])
def test_a_number_below_one_is_refused(name, arguments):
    with pytest.raises(ConfigError, match=f"{name} of at least 1, got 0"):
        ElasticSampler(*arguments, world=alone())


class StandIn:
    """A client whose rendezvous gives out numbers, and drops this learner for a while."""

    def __init__(self, total):
        self.registrations, self.view, self.budget = 1, None, self
        self.numbers, self.dropped, self.patient = iter(range(total)), False, []

    def declare(self, total, used):
        pass

    def draw(self, group, index, done, *, patient=False):
        self.patient.append(patient)
        if self.dropped:
            raise DroppedError("it was not heard for too long")
        return next(self.numbers, None)


def test_a_learner_that_is_dropped_while_it_draws_goes_on_to_its_next_step_where_it_joins_again():
    client = StandIn(total=4)
    world = World(0, 2, 0, 1, client=client)
    sampler = ElasticSampler(4, 1, world=world)
    batches = iter(sampler)
    first = next(batches)
    world.steps.taken += 1
    client.dropped = True
    assert next(batches) == first  # of a step that changes nothing
    client.dropped, client.registrations = False, 2
    world.steps.taken += 1
    assert len(list(batches)) == 3


@pytest.mark.parametrize("together", [False, True])
def test_a_learner_without_a_batch_waits_for_batches_of_others_only_if_no_step_waits_for_it(together):
    client = StandIn(total=0)
    world = World(0, 2, 0, 1, client=client)
    world.steps.together = together
    assert list(ElasticSampler(4, 1, world=world).remaining_epochs()) == []
    assert client.patient == [not together]


class Loop:
    """A learner in a thread that records the samples of every step that it has taken."""

    def __init__(self, ticket, learner, *, dies_at=None, pace_s=0.003, states=(), workers=0, epochs=2, samples=240):
        self.ticket, self.id, self.dies_at, self.pace_s = ticket, learner, dies_at, pace_s
        self.states, self.workers, self.epochs, self.samples = states, workers, epochs, samples
        self.used, self.state, self.error = [], None, None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self):
        world = join(self.ticket, self.id)
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        sampler = ElasticSampler(self.samples, 4, epochs=self.epochs, world=world)
        if self.states:
            sampler.load_state_dict(*self.states)
        loader = DataLoader(Numbers(self.samples), batch_sampler=sampler, num_workers=self.workers)
        with Learner(module, optimizer, ADPSGD(), world=world):
            for epoch in sampler.remaining_epochs():
                for numbers in loader:
                    module(numbers.float()[:, None]).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    self.used += [(epoch, int(number)) for number in numbers]
                    self.state = sampler.state_dict()
                    time.sleep(self.pace_s)
                    if self.dies_at and len(self.used) >= self.dies_at:
                        raise KeyboardInterrupt


def ended(loops):
    for loop in loops:
        loop.thread.join(60)
        assert not loop.thread.is_alive()
        assert loop.error is None or isinstance(loop.error, KeyboardInterrupt), loop.error
    return Counter(sample for loop in loops for sample in loop.used)


def twice(used):
    """Only the last step of a learner that dies may be unknown to the rendezvous, so its samples may be used again."""
    return {sample for sample, times in used.items() if times > 1}


def test_every_sample_is_used_once_an_epoch_although_learners_differ_in_speed_and_one_dies():
    with Rendezvous(learners=3) as rendezvous:
        loops = [Loop(rendezvous.ticket, i, dies_at=40 if i == 1 else None, pace_s=(i + 1) * 3e-3) for i in range(3)]
        used = ended(loops)
    assert set(used) == {(epoch, number) for epoch in range(2) for number in range(240)}
    assert twice(used) <= set(loops[1].used[-4:])
    assert len(loops[0].used) > len(loops[2].used)


def test_a_learner_that_joins_takes_its_part_of_the_budget():
    with Rendezvous(learners=1) as rendezvous:
        first = Loop(rendezvous.ticket, 0, pace_s=0.02)
        while len(first.used) < 40:
            time.sleep(0.01)
        second = Loop(rendezvous.ticket, None)
        used = ended([first, second])
    assert second.used
    assert set(used.values()) == {1}
    assert len(used) == 480


def test_a_run_is_resumed_by_other_learners_and_every_sample_is_used():
    with Rendezvous(learners=2) as rendezvous:
        before = [Loop(rendezvous.ticket, i, dies_at=60) for i in range(2)]
        used = ended(before)
    states = [loop.state for loop in before]
    with Rendezvous(learners=3) as rendezvous:
        after = [Loop(rendezvous.ticket, 0, states=states[:1]), Loop(rendezvous.ticket, 1, states=states[1:])]
        after.append(Loop(rendezvous.ticket, 2))
        used += ended(after)
    assert len(used) == 480
    # The last batch of the learner that died first may have been used again by the other one.
    assert any(twice(used) <= set(loop.used[-4:]) for loop in before)


def test_workers_of_a_data_loader_fetch_ahead_and_nothing_is_lost():
    with Rendezvous(learners=2) as rendezvous:
        loops = [Loop(rendezvous.ticket, i, workers=1, dies_at=40 if i else None, epochs=1) for i in range(2)]
        used = ended(loops)
    assert set(used) == {(0, number) for number in range(240)}
    assert twice(used) <= set(loops[1].used[-4:])

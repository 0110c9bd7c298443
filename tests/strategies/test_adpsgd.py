import contextlib
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from worlds import LR, train, weights, world

from roundelay.cluster.membership import Membership
from roundelay.errors import PeerLostError, StrategyError, TopologyError
from roundelay.simulation import run
from roundelay.strategies import ADPSGD
from roundelay.strategies.pair_exchange import CallingEnd
from roundelay.topology import complete, random_ring, ring, spectral_gap, star
from roundelay.transport.heartbeats import SILENT_AFTER_S
from roundelay.transport.solo import SoloTransport
from roundelay.weights.replica import Replica

ALONE = "goes on alone"


def counting_updates(learners):
    """Sum over learners of every update that plain SGD applies: -alpha g, wherever g was taken."""
    total = np.zeros(12)

    def counted(learner):
        inner = learner.gradient

        def gradient(step):
            inner(step)
            parts = [p.grad for p in learner.module.parameters()]
            total[:] -= LR * torch.cat(parts).numpy()

        return gradient

    for learner in learners:
        learner.gradient = counted(learner)
    return total


def scatter(learners, seed=0):
    """Weights that differ from learner to learner, as after some training."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for learner in learners:
            for parameter in learner.module.parameters():
                parameter.copy_(torch.tensor(rng.standard_normal(parameter.shape)))


@settings(max_examples=25)
@given(
    paces=st.lists(st.floats(0.01, 3.0), min_size=4, max_size=4),
    jitter=st.lists(st.floats(0.0, 1.0), min_size=7, max_size=7),
    steps=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    latency_s=st.sampled_from([0.0, 0.01, 0.7, 5.0]),
    topology=st.sampled_from([ring, random_ring, star, complete]),
    max_lead=st.integers(1, 16),
)
def test_initial_sum_plus_updates_is_the_final_sum(paces, jitter, steps, latency_s, topology, max_lead):
    pace = lambda rank, step: paces[rank] + jitter[(rank + step) % 7]  # noqa: E731
    strategies = [ADPSGD(topology(4), max_lead) for _ in range(4)]
    clock, network, learners = world(strategies, compute_s=pace, latency_s=latency_s, momentum=0.0)
    scatter(learners)
    initial, updates = weights(learners).sum(0), counting_updates(learners)
    train(clock, network, learners, steps)
    np.testing.assert_allclose(weights(learners).sum(0), initial + updates, rtol=0, atol=1e-9)
    for learner in learners:
        metrics = learner.strategy.metrics()
        assert metrics["exchanges_finished"] + metrics["exchanges_failed"] == metrics["exchanges_started"]


@pytest.mark.parametrize("topology", [ring, random_ring, star])
def test_without_gradients_exchanges_keep_the_mean_and_shrink_the_spread(topology):
    clock, _, learners = world(
        [ADPSGD(topology(6)) for _ in range(6)], compute_s=lambda r, k: 0.7 + 0.1 * ((r + k) % 3), lr=0.0
    )
    scatter(learners)
    before = weights(learners)
    run(clock, learners, 60)
    after = weights(learners)
    np.testing.assert_allclose(after.mean(0), before.mean(0), rtol=0, atol=1e-14)
    assert after.std(0).max() < 1e-3 * before.std(0).max()


def live(learners):
    return np.stack([np.concatenate([v.numpy() for v in learner.strategy.weights().views]) for learner in learners])


def test_an_exchange_moves_both_ends_by_a_third_of_their_difference():
    clock, _, learners = world([ADPSGD(ring(2)) for _ in range(2)], lr=0.0, compute_s=lambda r, k: [1.0, 9.0][r])
    scatter(learners)
    before = weights(learners)
    for learner in learners:
        clock.spawn(learner.process(1))
    clock.run(until=2.0)
    W = np.array([[2, 1], [1, 2]]) / 3
    np.testing.assert_allclose(live(learners), W @ before, rtol=0, atol=1e-15)
    assert np.array_equal(weights(learners)[1], before[1]), "working weights never change while a gradient is computed"


@pytest.mark.parametrize("size", [4, 6, 16])
def test_in_lockstep_on_a_ring_exchanges_are_the_papers_matrix(size):
    """Every learner calls its successor while its predecessor calls it, so a step is W = ring(n), 1/3 each."""
    clock, _, learners = world([ADPSGD(ring(size)) for _ in range(size)], lr=0.0, latency_s=0.1)
    scatter(learners)
    before = weights(learners)
    for learner in learners:
        clock.spawn(learner.process(10**6))
    W = ring(size).matrix()
    for step in range(1, 7):
        clock.run(until=step + 0.5)
        expected = np.linalg.matrix_power(W, step) @ before
        np.testing.assert_allclose(live(learners), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [8, 16])
def test_in_lockstep_the_consensus_error_falls_at_least_as_fast_as_the_ring_says(size):
    clock, _, learners = world([ADPSGD(ring(size)) for _ in range(size)], lr=0.0, latency_s=0.1)
    scatter(learners)
    before = weights(learners)
    for learner in learners:
        clock.spawn(learner.process(10**6))
    steps = 40
    clock.run(until=steps + 0.5)
    gap = spectral_gap(ring(size))
    error = np.linalg.norm(live(learners) - before.mean(0))
    assert error <= (1 - gap) ** steps * np.linalg.norm(before - before.mean(0)) * (1 + 1e-9)


def test_equal_seeds_give_equal_bits():
    def result():
        clock, _, learners = world(
            [ADPSGD(random_ring(4, seed=3)) for _ in range(4)], compute_s=lambda r, k: 1 + 0.3 * r, latency_s=0.4
        )
        run(clock, learners, 50)
        return weights(learners), [learner.strategy.metrics() for learner in learners]

    (X, metrics), (Y, others) = result(), result()
    assert np.array_equal(X, Y)
    assert metrics == others


def test_a_straggler_slows_no_other_learner_down():
    clock, _, learners = world(
        [ADPSGD(random_ring(4)) for _ in range(4)], compute_s=lambda rank, _: 10.0 if rank == 0 else 1.0
    )
    ends = [clock.spawn(learner.process(5 if learner.transport.rank == 0 else 50)) for learner in learners]
    clock.run(until=50.5)
    assert [end.done() for end in ends] == [True] * 4


@settings(max_examples=20)
@given(
    max_lead=st.integers(1, 5),
    latency_s=st.sampled_from([0.1, 3.0, 12.0]),
    paces=st.lists(st.floats(0.5, 5.0), min_size=4, max_size=4),
    topology=st.sampled_from([ring, random_ring, star]),
)
def test_no_learner_leads_by_more_than_max_lead_while_neighbours_live(max_lead, latency_s, paces, topology):
    clock, _, learners = world(
        [ADPSGD(topology(4), max_lead) for _ in range(4)], compute_s=lambda rank, _: paces[rank], latency_s=latency_s
    )
    for learner in learners:
        clock.spawn(learner.process(10**6))
    clock.run(until=40.0)
    for learner in learners:
        assert learner.strategy.metrics()["lead_max"] <= max_lead
        assert learner.strategy.metrics()["exchanges_started"] > 0


@pytest.mark.parametrize("topology", [ring, random_ring, complete])
def test_an_exchange_lost_at_max_lead_is_made_up_with_another_neighbour(topology):
    clock, network, learners = world([ADPSGD(topology(4), max_lead=2) for _ in range(4)], latency_s=3.0)
    for learner in learners:
        process = learner.process(10**6)
        ended = clock.spawn(process)
        if learner.transport.rank == 2:
            clock.call_later(20.5, lambda process=process, ended=ended: clock.kill(ended, process))
    network.kill(2, at=20.5)
    clock.run(until=200.0)
    for rank in (0, 1, 3):
        metrics = learners[rank].strategy.metrics()
        assert metrics["lead_max"] <= 2
        assert metrics["peers_lost"] == 1
        assert metrics["exchanges_finished"] > 20


def test_survivors_go_on_and_say_when_no_neighbour_is_left(caplog):
    clock, network, learners = world([ADPSGD(ring(3)) for _ in range(3)])
    with caplog.at_level(logging.WARNING, "roundelay"):
        train(clock, network, learners, [50] * 3, kill={0: 3.3, 2: 7.7})
    metrics = learners[1].strategy.metrics()
    assert metrics["peers_lost"] == 2
    assert metrics["lead_max"] > 16, "max_lead does not apply when no neighbour is left"
    assert learners[1].strategy._counts.steps == 50
    assert [record.getMessage() for record in caplog.records if ALONE in record.getMessage()] == [
        "learner 1 has no neighbour left to exchange with and goes on alone"
    ]


def test_a_cut_link_is_survived_by_both_sides():
    clock, network, learners = world([ADPSGD(ring(4)) for _ in range(4)])
    network.cut(0, 1, at=3.3)
    run(clock, learners, 40)
    assert [learner.strategy._counts.steps for learner in learners] == [40] * 4
    assert learners[0].strategy.metrics()["exchanges_with_3"] > 15


def test_staleness_and_lead_of_a_schedule_worked_out_by_hand():
    """Learner 0 steps at 1, 2, 3 s, learner 1 at 2 and 4 s; a message takes 0.1 s.

    Exchanges of 0 are served by 1 at 1.1, 2.1, 3.1 and applied by 0 at 1.2, 2.2, 3.2; that of 1 is served by 0 at 2.1
    and applied at 2.2. So 0 steps after 0, 1 and 2 exchanges since it read its weights, and 1 after 1 and 3.
    """
    clock, network, learners = world(
        [ADPSGD(ring(2)) for _ in range(2)], compute_s=lambda rank, _: 1.0 + rank, latency_s=0.1
    )
    train(clock, network, learners, [3, 2])
    first, second = (learner.strategy.metrics() for learner in learners)
    names = [
        "exchanges_started",
        "exchanges_finished",
        "exchanges_served",
        "staleness_mean",
        "staleness_max",
        "lead_max",
    ]
    assert [first[name] for name in names] == [3, 3, 1, 1.0, 2, 1]
    assert [second[name] for name in names] == [1, 1, 3, 2.0, 3, 1]
    assert first["exchanges_per_step"] == 1.0
    assert first["exchanges_with_1"] == 3


def test_neighbours_are_called_in_turn():
    clock, _, learners = world([ADPSGD(ring(5)) for _ in range(5)])
    run(clock, learners, 40)
    metrics = learners[2].strategy.metrics()
    assert metrics["exchanges_with_1"] == metrics["exchanges_with_3"] == 20


def test_spread_comes_from_the_disagreement_of_exchanges():
    clock, _, learners = world([ADPSGD(ring(2)) for _ in range(2)], lr=0.0, compute_s=lambda r, k: [1.0, 9.0][r])
    scatter(learners)
    before = weights(learners)
    run(clock, learners, 1)
    distance = np.linalg.norm(before[0] - before[1])
    assert learners[0].strategy.metrics()["spread"] == pytest.approx(distance / 2, rel=1e-12)


# Alone: what needs no peers ---------------------------------------------------------------------------------------------


def alone():
    module = torch.nn.Linear(2, 1)
    strategy = ADPSGD(ring(1))
    strategy.attach(Replica(module), SoloTransport(), Membership.of(1))
    return module, strategy


def finish(steps):
    for future in steps:
        future.result(0)


def test_a_step_that_raises_releases_the_lock():
    module, strategy = alone()
    own = module.weight.data_ptr()
    finish(strategy.before_step())
    assert strategy._live.lock.locked()
    strategy.abandon()
    strategy.abandon()
    assert not strategy._live.lock.locked()
    assert module.weight.data_ptr() == own
    finish(strategy.before_step())
    finish(strategy.before_step())  # the first of these two steps has raised
    finish(strategy.after_step())
    assert not strategy._live.lock.locked()


@pytest.mark.parametrize("end", ["drain", "finish"])
def test_drain_and_finish_release_a_step_that_raised_too(end):
    _, strategy = alone()
    finish(strategy.before_step())
    finish(getattr(strategy, end)())
    assert not strategy._live.lock.locked()


def test_abandon_before_attach_does_nothing():
    ADPSGD(ring(1)).abandon()


def test_a_loaded_state_goes_on_in_its_round_with_the_weights_of_the_module():
    module, strategy = alone()
    torch.nn.init.constant_(module.weight, 3.0)
    strategy.load_state_dict({"round": 11})
    assert strategy.state_dict() == {"round": 11}
    assert (strategy.weights().views[0] == 3.0).all()


def test_after_drain_the_module_has_the_live_weights():
    module, strategy = alone()
    strategy.weights().views[0].fill_(7.0)  # as an exchange would
    finish(strategy.drain())
    assert (module.weight == 7.0).all()


def test_a_reply_that_did_not_arrive_is_taken_back():
    _, strategy = alone()
    before = strategy.weights().storage.clone()
    request = torch.randn(1, 3).view(torch.uint8).flatten()
    request = torch.nn.functional.pad(request, (0, strategy.weights().storage.nbytes - request.nbytes))
    with contextlib.suppress(ConnectionError), strategy._answer(0, request, request) as exchange:
        exchange.apply(0)
        assert not torch.equal(strategy.weights().storage, before)
        raise ConnectionError("the caller has not confirmed")
    torch.testing.assert_close(strategy.weights().storage.view(torch.float32), before.view(torch.float32))
    assert strategy.metrics()["exchanges_served"] == 0


def test_an_error_while_a_reply_is_applied_is_raised_at_the_next_step(monkeypatch):
    clock, _, learners = world([ADPSGD(ring(2)) for _ in range(2)])

    def broken(end, k):
        raise ZeroDivisionError("in the background")

    monkeypatch.setattr(CallingEnd, "apply", broken)
    with pytest.raises(ZeroDivisionError, match="in the background"):
        run(clock, learners, 10)


def test_an_error_while_a_correction_is_freed_is_raised_too_and_ends_the_exchange(monkeypatch):
    _, network, learners = world([ADPSGD(ring(2)) for _ in range(2)])
    strategy, transport = learners[0].strategy, network.transports[0]
    strategy.attach(Replica(learners[0].module), transport, Membership.of(2))
    finish(strategy.before_step())
    finish(strategy.after_step())

    def broken(buffer):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(transport, "free", broken)
    transport.lose(1, "its process ended")  # its reply was on the way
    assert strategy._own._last.over.done()
    with pytest.raises(OSError, match="Too many open files"):
        finish(strategy.drain())


def test_an_exchange_that_is_served_wakes_a_step_that_waits_for_one():
    _, network, learners = world([ADPSGD(ring(2), max_lead=1) for _ in range(2)])
    strategy = learners[0].strategy
    strategy.attach(Replica(learners[0].module), network.transports[0], Membership.of(2))
    finish(strategy.before_step())
    finish(strategy.after_step())
    step = strategy.before_step()
    waiting = next(step)  # the own exchange cannot end: the clock does not run
    assert not waiting.done()
    request = strategy.weights().storage.clone()
    with strategy._answer(1, request, request) as exchange:
        exchange.apply(0)
    assert waiting.done()
    with pytest.raises(StopIteration):
        next(step)
    strategy.abandon()


def test_a_peer_that_has_come_back_is_not_lost_with_its_old_connection():
    _, network, learners = world([ADPSGD(ring(2)) for _ in range(2)])
    strategy, transport = learners[0].strategy, network.transports[0]
    strategy.attach(Replica(learners[0].module), transport, Membership.of(2))
    finish(strategy.before_step())
    finish(strategy.after_step())
    transport._pending[0][1].set_exception(PeerLostError(1, "it has come back at another address"))
    assert strategy._own._last.over.done()
    assert strategy.metrics()["peers_lost"] == 0
    assert strategy._own._start()


def test_bad_arguments_are_refused():
    with pytest.raises(StrategyError, match="max_lead must be at least 1 step, got 0"):
        ADPSGD(ring(4), max_lead=0)
    with pytest.raises(TopologyError, match=r"ring\(4\) is for 4 learners, but there are 1"):
        ADPSGD(ring(4)).attach(Replica(torch.nn.Linear(1, 1)), SoloTransport(), Membership.of(1))


def test_an_exchange_that_does_not_end_delays_no_learner_that_has_another_neighbour():
    # Learner 0 is cut off at 5.0. It is lost 5 s later, but after three missed beats no learner waits for it any more.
    mixing = complete(4)
    clock, network, learners = world(
        [ADPSGD(mixing, max_lead=4) for _ in range(4)], compute_s=lambda rank, step: 0.1 + 0.01 * rank
    )
    for other in (1, 2, 3):
        network.cut(0, other, at=5.0)
    paces, leads = {rank: [] for rank in range(4)}, []
    for learner in learners:
        taken, rank = learner.gradient, learner.transport.rank

        def gradient(step, taken=taken, rank=rank):
            paces[rank].append(clock.now())
            if clock.now() < 10.0:
                leads.append(learners[rank].strategy.metrics()["lead"])
            taken(step)

        learner.gradient = gradient
    train(clock, network, learners, [110] * 4)
    for rank in (1, 2, 3):
        assert max(np.diff(paces[rank])) < SILENT_AFTER_S + 0.2
    assert max(leads) == 4
    assert max(np.diff(paces[0])) > 4.0  # learner 0 has no other neighbour, and may not lead by more


def test_saving_does_not_wait_for_an_exchange():
    clock, network, learners = world([ADPSGD(complete(2), max_lead=4) for _ in range(2)])
    network.cut(0, 1, at=0.5)
    seconds = []

    def process():
        yield from VirtualSaver(learners[0], clock, seconds).process()

    clock.spawn(process(), "learner 0")
    clock.spawn(learners[1].process(2), "learner 1")
    clock.run()
    assert seconds == [0.0]


class VirtualSaver:
    """Takes a step, whose exchange will never end, and saves."""

    def __init__(self, learner, clock, seconds):
        self.learner, self.clock, self.seconds = learner, clock, seconds

    def process(self):
        strategy = self.learner.strategy
        strategy.attach(Replica(self.learner.module), self.learner.transport, Membership.of(2))
        self.learner.transport.on_lost(strategy.peer_lost)
        self.learner.gradient(0)
        yield 1.0
        yield from strategy.before_step()
        self.learner.optimizer.step()
        yield from strategy.after_step()
        began = self.clock.now()
        yield from strategy.before_saving()
        self.seconds.append(self.clock.now() - began)
        yield from strategy.finish()
        self.learner.transport.close()

"""Whose weights a learner takes when it joins, and after a meeting. The transport is a stand-in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from learner_states import StateTransport, bytes_of, training_state

from roundelay.cluster.membership import Membership
from roundelay.errors import LaunchError, PeerLostError
from roundelay.meeting import Progress
from roundelay.state_transfer import take_mean, take_newest


def at(steps):
    return Progress(ready=True, first_unconfirmed=0, weight_steps=steps)


def first():
    return Progress(ready=False, first_unconfirmed=0, weight_steps=0, initial=True)


JOINS = Progress(ready=False, first_unconfirmed=0, weight_steps=0)


def test_a_joining_learner_begins_with_the_mean_of_its_two_nearest_peers():
    module, state = training_state(0.0)
    transport = StateTransport({0: bytes_of(1.0), 1: bytes_of(9.0), 2: bytes_of(3.0)})
    take_mean(3, state, transport, Membership.of(4))
    assert torch.equal(module.weight, torch.full((1, 2), 2.0))  # learners 0 and 2, on a ring


def test_a_joining_learner_takes_the_state_of_any_other_if_the_nearest_are_lost():
    module, state = training_state(0.0)
    take_mean(3, state, StateTransport({1: bytes_of(9.0)}), Membership.of(4))
    assert torch.equal(module.weight, torch.full((1, 2), 9.0))


def test_a_joining_learner_takes_no_weights_that_are_not_finite():
    module, state = training_state(0.0)
    transport = StateTransport({0: bytes_of(float("nan")), 1: bytes_of(9.0), 2: bytes_of(3.0)})
    take_mean(3, state, transport, Membership.of(4))
    assert torch.equal(module.weight, torch.full((1, 2), 3.0))
    with pytest.raises(LaunchError, match="finite"):
        take_mean(3, state, StateTransport({1: bytes_of(float("inf"))}), Membership.of(4))


def test_a_joining_learner_that_reaches_no_other_says_so_and_may_try_again():
    with pytest.raises(PeerLostError, match="its process ended"):
        take_mean(3, training_state(0.0)[1], StateTransport(), Membership.of(4))
    with pytest.raises(PeerLostError, match="no other learner is left"):
        take_mean(0, training_state(0.0)[1], StateTransport(), Membership.of(1))


def test_if_all_learners_were_dropped_they_take_the_weights_of_the_one_with_the_most_steps():
    dropped = {learner: replace(JOINS, weight_steps=steps, earlier=True) for learner, steps in enumerate((8, 10, 9))}
    module, state = training_state(1.0)
    everyone = dropped | {3: JOINS}
    assert take_newest(0, state, StateTransport({1: bytes_of(5.0)}), everyone, needs_equal_weights=False)
    assert torch.equal(module.weight, torch.full((1, 2), 5.0))
    assert not take_newest(1, state, StateTransport(), everyone, needs_equal_weights=False)
    ready = everyone | {2: at(3)}  # the run went on without those that were dropped
    assert not take_newest(2, state, StateTransport(), ready, needs_equal_weights=True)


@pytest.mark.parametrize(("needs_equal_weights", "expected"), [(True, 5.0), (False, 1.0)])
def test_after_a_meeting_a_learner_behind_keeps_its_weights_unless_all_must_be_equal(needs_equal_weights, expected):
    module, state = training_state(1.0)
    transport = StateTransport({1: bytes_of(5.0)})
    took = take_newest(0, state, transport, {0: at(9), 1: at(10)}, needs_equal_weights=needs_equal_weights)
    assert took == needs_equal_weights
    assert torch.equal(module.weight, torch.full((1, 2), expected))


def test_after_a_meeting_a_learner_without_weights_takes_those_with_the_most_steps():
    module, state = training_state(0.0)
    transport = StateTransport({2: bytes_of(5.0)})
    assert take_newest(0, state, transport, {0: JOINS, 1: at(9), 2: at(10)}, needs_equal_weights=False)
    assert torch.equal(module.weight, torch.full((1, 2), 5.0))


def test_learners_that_begin_together_take_the_weights_of_the_first_which_offers_its_own():
    progress = {0: first(), 1: first()}
    module, state = training_state(1.0)
    transport = StateTransport()
    assert not take_newest(0, state, transport, progress, needs_equal_weights=True)
    other_module, other_state = training_state(7.0)
    assert take_newest(1, other_state, StateTransport({0: transport.offered()}), progress, needs_equal_weights=True)
    assert torch.equal(other_module.weight, module.weight)

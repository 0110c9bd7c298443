from __future__ import annotations

from roundelay.cluster.rendezvous.stop_agreement import StopAgreement


def agreement(*groups):
    stop = StopAgreement()
    stop.stop_groups = groups
    return stop


def test_the_last_step_is_known_once_all_living_learners_of_the_group_have_said_theirs():
    stop = agreement(0, 0, 1)
    stop.begun(0, 5)
    assert stop.last_step(0, living=[0, 1, 2]) is None
    stop.begun(1, 7)
    assert stop.last_step(0, living=[0, 1, 2]) == stop.last_step(1, living=[0, 1, 2]) == 7


def test_a_learner_that_was_lost_after_it_said_its_steps_still_counts():
    stop = agreement(0, 0)
    stop.begun(1, 9)
    stop.begun(0, 5)
    assert stop.last_step(0, living=[0]) == 9


def test_a_learner_that_joined_later_belongs_to_the_only_group_or_stops_alone():
    one, several = agreement(0, 0), agreement(0, 1)
    for stop in (one, several):
        stop.begun(2, 3)
    assert one.last_step(2, living=[0, 1, 2]) is None
    assert several.last_step(2, living=[0, 1, 2]) == 3

"""What learners agree on at a meeting, from the progress that each one brings."""

from __future__ import annotations

import pytest

from roundelay.cluster.membership import Membership, View
from roundelay.errors import LaunchError, MembershipChangedError, StrategyError
from roundelay.meeting import PROGRESS, Progress, agreed_progress, check_groups, progress_in, values_in


def test_learners_go_on_from_the_first_chunk_that_not_all_have_used():
    own = Progress(ready=True, first_unconfirmed=12, weight_steps=10)
    behind = Progress(ready=True, first_unconfirmed=8, weight_steps=9)
    joins = Progress(ready=False, first_unconfirmed=0, weight_steps=0)
    assert agreed_progress(own, {0: own, 1: behind, 2: joins}) == Progress(True, 8, 10)


def test_learners_that_begin_the_run_begin_with_the_weights_of_the_first_of_them():
    first = Progress(ready=False, first_unconfirmed=0, weight_steps=0, initial=True)
    assert agreed_progress(first, {0: first, 1: first}) == Progress(True, 0, 0)


def test_a_meeting_without_weights_of_the_run_fails():
    joins = Progress(ready=False, first_unconfirmed=0, weight_steps=0)
    with pytest.raises(LaunchError, match="--resume"):
        agreed_progress(joins, {0: joins})


def test_a_meeting_of_different_modules_is_refused():
    own, other = (Progress(True, 0, 0, agreement=text) for text in ("a", "b"))
    with pytest.raises(StrategyError, match="differs from the other learners'"):
        agreed_progress(own, {0: own, 1: other})


def test_progress_travels_through_a_view():
    progress = {0: Progress(True, 3, 4, agreement="a"), 1: Progress(False, 0, 0, initial=True)}
    values = {learner: each.to_value() for learner, each in progress.items()}
    assert progress_in(View(Membership.of(2), {}, values)) == progress


def test_learners_that_wait_for_different_things_must_meet():
    values = {0: Progress(True, 0, 0).to_value(), 1: {"gathered": 3}}
    with pytest.raises(MembershipChangedError, match="all must meet"):
        values_in(View(Membership.of(2), {}, values), PROGRESS)


def test_a_super_learner_that_has_lost_a_member_leaves_and_the_others_meet_once_more():
    after = Membership.of(4).without(3)
    with pytest.raises(LaunchError, match="learner 2 leaves, because its group of 2 has lost a member"):
        check_groups(2, after, group_size=2)
    with pytest.raises(MembershipChangedError, match=r"the groups of learners \[2\] are not complete"):
        check_groups(0, after, group_size=2)
    check_groups(0, after.without(2), group_size=2)

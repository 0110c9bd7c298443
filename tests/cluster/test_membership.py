import pytest

from roundelay.cluster.membership import Membership


def test_a_new_generation_leaves_the_old_value_alone():
    four = Membership.of(4)
    three = four.without(2)
    assert four == Membership((0, 1, 2, 3), generation=0)
    assert three == Membership((0, 1, 3), generation=1)
    assert three.size == 3


def test_positions_are_places_in_the_mixing():
    members = Membership.of(4).without(1)
    assert [members.position(learner) for learner in members.living] == [0, 1, 2]
    with pytest.raises(KeyError, match="1"):
        members.position(1)

import pytest

from roundelay.cluster.membership import Membership, View


def test_a_new_generation_leaves_the_old_value_alone():
    four = Membership.of(4)
    three = four.without(2)
    assert four == Membership((0, 1, 2, 3), generation=0)
    assert three == Membership((0, 1, 3), generation=1)
    assert three.size == 3


def test_positions_are_rows_of_the_mixing():
    members = Membership.of(4).without(1)
    assert [members.position(learner) for learner in members.living] == [0, 1, 2]
    with pytest.raises(KeyError, match="1"):
        members.position(1)


def test_a_view_is_read_from_a_message_with_text_keys():
    view = View.from_message({"generation": 3, "living": {"4": ["h", 1], "0": ["g", 2]}, "values": {"4": "x"}})
    assert view.membership == Membership((0, 4), generation=3)
    assert view.addresses == {0: ("g", 2), 4: ("h", 1)}
    assert view.values == {4: "x"}

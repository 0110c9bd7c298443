from __future__ import annotations

from hypothesis import given, strategies as st

from roundelay.cluster.rendezvous.cursor import Cursor


@given(
    total=st.integers(0, 40),
    used=st.sets(st.integers(0, 45)),
    order=st.lists(st.integers(0, 3), min_size=60, max_size=80),
)
def test_every_number_that_was_not_used_is_given_once(total, used, order):
    cursor, asked = Cursor(total, used), [0] * 4
    given_numbers = []
    for group in order:
        number = cursor.draw(group, asked[group])
        if number is not None:
            assert cursor.draw(group, asked[group]) == number  # asked again, the answer is the same
            asked[group] += 1
            given_numbers.append(number)
    assert given_numbers == sorted(set(range(total)) - used)


@given(total=st.integers(1, 30), events=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ddddx")), max_size=80))
def test_every_number_is_done_and_only_unfinished_numbers_of_lost_groups_are_done_twice(total, events):
    cursor, asked, done, lost = Cursor(total), [0] * 3, [], []

    def draw(group):
        number = cursor.draw(group, asked[group])
        if number is not None:
            cursor.done(group, asked[group])  # all but this one
            asked[group] += 1
            done.append(number)

    for group, event in events:
        if event == "d":
            draw(group)
        else:
            lost += cursor.give_back(group)
            asked[group] = 0
    index = 0
    while (number := cursor.draw(9, index)) is not None:  # a group that joined late does the rest
        done.append(number)
        index += 1
    assert set(done) == set(range(total))
    assert sorted(done) == sorted([*range(total), *lost])


def test_a_drawn_number_is_outstanding_until_it_is_done_or_given_back():
    cursor = Cursor(2)
    assert not cursor.outstanding
    cursor.draw(0, 0)
    cursor.draw(1, 0)
    cursor.done(0, 1)
    assert cursor.outstanding
    assert cursor.give_back(1) == [1]
    assert not cursor.outstanding


@given(
    total=st.integers(1, 20),
    events=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["draw", "draw", "take", "connect", "die"])), max_size=60
    ),
)
def test_no_number_is_lost_if_learners_take_some_unasked_and_die(total, events):
    """Each learner knows what it has; the cursor hears of numbers that were taken unasked when the learner connects again."""
    cursor, drawn, done = Cursor(total), [{}, {}, {}], set()
    for group, event in events:
        own = drawn[group]
        if event == "draw":
            cursor.hold(group, own, max(len(own) - 1, 0), alone=True)
            number = cursor.draw(group, len(own))
        elif event == "take":
            number = next((n for n in range(total) if n not in own.values()), None)
        else:
            if event == "connect":
                cursor.hold(group, own, max(len(own) - 1, 0), alone=True)
            else:
                done.update(list(own.values())[:-1])  # all but the last are done
                cursor.hold(group, own, max(len(own) - 1, 0), alone=True)
                cursor.give_back(group)
                own.clear()
            continue
        if number is not None:
            own[len(own)] = number
    for group, own in enumerate(drawn):
        cursor.hold(group, own, len(own), alone=True)
        done.update(own.values())
    index = 0
    while (number := cursor.draw(9, index)) is not None:
        done.add(number)
        index += 1
    assert done == set(range(total))

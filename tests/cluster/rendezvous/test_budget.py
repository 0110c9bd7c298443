from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from roundelay.cluster.membership import Membership
from roundelay.cluster.rendezvous.budget import LocalBudget, SharedBudget
from roundelay.cluster.rendezvous.budget_client import BudgetClient
from roundelay.errors import DroppedError, RendezvousLostError


def test_the_first_size_counts_and_what_each_learner_has_used_adds_up():
    budget = SharedBudget()
    budget.declare(0, 4, [1])
    assert not budget.declared_by([0, 1])
    budget.declare(1, 9, [2])
    assert budget.declared_by([0, 1])
    assert [budget.draw(0, 0, index, index)[0] for index in range(3)] == [0, 3, None]
    assert budget.given == 4


def test_a_lost_learner_gives_back_what_all_its_groups_had_not_finished():
    budget = SharedBudget()
    budget.declare(7, 4, [])
    for index, group in enumerate((0, 1, 0)):
        budget.draw(7, group, index // 2, done=0)
    assert sorted(budget.give_back(7)) == [0, 1, 2]
    assert budget.draw(8, 8, 0, 0) == (0, True)


@given(total=st.integers(0, 40), size=st.integers(1, 5), rounds=st.integers(1, 10))
def test_while_the_rendezvous_is_away_no_two_learners_take_the_same_number(total, size, rounds):
    budgets = [LocalBudget() for _ in range(size)]
    taken = []
    for budget in budgets:
        budget.total = total
    for _ in range(rounds):
        for learner, budget in enumerate(budgets):
            number = budget.next_own(learner, Membership.of(size))
            if number is not None:
                budget.drawn[len(budget.drawn)] = number
                taken.append(number)
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(range(total))


def test_a_patient_learner_that_has_used_its_own_numbers_waits_for_the_rendezvous():
    asked = []

    def ask(kind, *, repeat=False, **fields):
        asked.append((kind, repeat))
        if kind == "draw" and not repeat:
            raise RendezvousLostError("the rendezvous is away")
        return {"number": 0}  # a repeated request waits until the rendezvous is back

    client = BudgetClient(ask, lambda: (1, Membership.of(2)))
    client.declare(4, [])
    assert [client.draw(1, index, index) for index in range(3)] == [1, 3, None]
    assert client.draw(1, 2, 2, patient=True) == 0
    assert asked[-2:] == [("draw", False), ("draw", True)]


def test_the_size_of_the_budget_is_said_again_after_it_was_lost_and_after_a_new_registration():
    asked, failing = [], [DroppedError("dropped"), None]

    def ask(kind, *, repeat=False, **fields):
        asked.append((kind, fields.get("total")))
        if failing and (error := failing.pop(0)):
            raise error
        return {"number": 0}

    client = BudgetClient(ask, lambda: (1, Membership.of(2)))
    with pytest.raises(DroppedError):
        client.declare(4, [])
    client.declare(4, [])
    client.draw(1, 0, 0)
    assert asked == [("budget", 4), ("budget", 4), ("draw", None)]
    client.declared = False  # a new registration
    client.draw(1, 1, 1)
    assert asked[3:] == [("budget", 4), ("draw", None)]

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, strategies as st

from roundelay.training.coordinator import Coordinator, CoordinatorServer, Cursor
from roundelay.transport.security import Security

SECURITY = Security(secrets.token_bytes(32))


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
        assert cursor.draw(group, asked[group]) == number  # whoever asks again hears the same
        asked[group] += 1
        if number is not None:
            given_numbers.append(number)
    assert given_numbers == sorted(set(range(total)) - used)


@pytest.fixture
def desk():
    """A server of four learners in two parties, and a way to connect."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = CoordinatorServer(listener, SECURITY, parties=[0, 0, 1, 1])
    lines = []

    def connect(rank: int, security: Security = SECURITY) -> Coordinator:
        lines.append(Coordinator(listener.getsockname()[:2], rank, security))
        return lines[-1]

    yield connect
    for line in lines:
        line.close()
    server.close()


def test_draws_over_sockets_are_those_of_one_cursor(desk):
    first, second = desk(0), desk(2)
    first.begin(5, [1])
    second.begin(5, [1])
    assert [first.draw(0, 0), second.draw(1, 0), second.draw(1, 1), first.draw(0, 1), first.draw(0, 2)] == [
        0,
        2,
        3,
        4,
        None,
    ]


def test_members_of_a_group_hear_the_same(desk):
    first, second = desk(0), desk(1)
    first.begin(3, [])
    assert [first.draw(0, 0), second.draw(0, 0), second.draw(0, 1), first.draw(0, 1)] == [0, 0, 1, 1]


def test_a_party_ends_with_the_furthest_step_that_one_of_it_has_begun(desk):
    lines = [desk(rank) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        waiting = pool.submit(lines[0].last_step, 7)
        others = [pool.submit(lines[rank].last_step, begun) for rank, begun in ((2, 3), (3, 1))]
        assert [other.result(10) for other in others] == [3, 3]
        assert not waiting.done()
        assert pool.submit(lines[1].last_step, 9).result(10) == 9
        assert waiting.result(10) == 9


def test_a_learner_that_has_gone_stops_nobody_from_stopping(desk):
    staying, leaving = desk(0), desk(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(staying.last_step, 5)
        leaving.close()
        assert waiting.result(10) == 5


def test_all_that_stop_hear_one_mark(desk):
    first, second = desk(0), desk(2)
    first.begin(10, [])
    first.draw(0, 0)
    assert first.mark() == 1
    first.draw(0, 1)
    assert second.mark() == 1


def test_a_stranger_changes_nothing(desk):
    from roundelay.errors import HandshakeError

    with pytest.raises((HandshakeError, OSError)):
        desk(0, security=Security(bytes(32)))
    line = desk(0)
    line.begin(1, [])
    assert line.draw(0, 0) == 0

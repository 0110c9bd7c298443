from __future__ import annotations

import socket

import pytest
from hypothesis import given, strategies as st

from roundelay.cluster.rendezvous.messages import LIMIT_BYTES, MessageBuffer, MessageConnection, packed
from roundelay.errors import HandshakeError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(contents=st.lists(PLAIN, max_size=5), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_messages_survive_any_cutting_of_the_stream(contents, cuts):
    messages = [{"kind": "any", "content": content} for content in contents]
    stream, buffer, got = b"".join(map(packed, messages)), MessageBuffer(), []
    at = 0
    for cut in [*cuts, len(stream)]:
        got += buffer.feed(stream[at : at + cut])
        at += cut
    assert got == messages


@given(garbage=st.binary(max_size=200))
def test_garbage_is_refused_or_waits_for_more(garbage):
    try:
        for message in MessageBuffer().feed(garbage):
            assert isinstance(message["kind"], str)
    except HandshakeError:
        pass


def test_an_oversized_message_is_refused_before_it_is_read():
    with pytest.raises(HandshakeError, match="the limit is"):
        MessageBuffer().feed((LIMIT_BYTES + 1).to_bytes(4, "big"))


def test_a_connection_sends_later_what_the_socket_did_not_take_and_receives_what_came_before_the_end():
    here, there = socket.socketpair()
    connection, other = MessageConnection(here), MessageConnection(there)
    large = {"kind": "large", "text": "x" * 2**22}
    connection.send(large)
    got = []
    while not got:
        got += other.receive()
        connection.flush()
    assert got == [large]
    connection.send({"kind": "last"})
    connection.close()
    assert other.receive() == [{"kind": "last"}]
    with pytest.raises(ConnectionError):
        other.receive()
    other.close()

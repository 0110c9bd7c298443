from __future__ import annotations

import socket

import pytest
from hypothesis import given, strategies as st

from roundelay.cluster.rendezvous.messages import LIMIT_BYTES, MessageBuffer, MessageLine, packed
from roundelay.errors import HandshakeError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(contents=st.lists(PLAIN, max_size=5), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_messages_survive_any_cutting_of_the_stream(contents, cuts):
    messages = [{"kind": "any", "content": content} for content in contents]
    stream, inbox, got = b"".join(map(packed, messages)), MessageBuffer(), []
    at = 0
    for cut in [*cuts, len(stream)]:
        got += inbox.feed(stream[at : at + cut])
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
    with pytest.raises(HandshakeError, match="more than any learner sends"):
        MessageBuffer().feed((LIMIT_BYTES + 1).to_bytes(4, "big"))


def test_a_line_keeps_what_has_no_room_and_gives_what_came_before_the_end():
    here, there = socket.socketpair()
    line, other = MessageLine(here), MessageLine(there)
    large = {"kind": "large", "text": "x" * 2**22}
    line.send(large)
    got = []
    while not got:
        got += other.receive()
        line.flush()
    assert got == [large]
    line.send({"kind": "last"})
    line.close()
    assert other.receive() == [{"kind": "last"}]
    with pytest.raises(ConnectionError):
        other.receive()
    other.close()

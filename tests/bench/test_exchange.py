"""The exchange benchmark, small, between real processes; and how much of a slow link an exchange uses."""

import pytest

from roundelay.bench import exchange, namespaces
from roundelay.errors import RoundelayError

RATE_MBPS = 25.0  # 200 Mbit/s


def links_or_skip():
    try:
        with namespaces.machines(1):
            pass
    except RoundelayError as error:
        pytest.skip(str(error))


def test_both_media_are_measured_beside_their_floors():
    said = []
    rows = exchange.measure(100_000, 2, progress=said.append)
    assert [row.medium for row in rows] == said == ["tcp", "shared memory"]
    for row in rows:
        assert row.parameters == 100_000
        assert row.exchange_s > 0
        assert row.floor_s > 0
        assert row.MBps_each_way == pytest.approx(0.4 / row.exchange_s)


def test_a_worker_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(exchange, "LOOPBACK", "192.0.2.1")  # an address for documentation: no machine has it
    with pytest.raises(RoundelayError, match="a process of the benchmark ended early"):
        exchange.measure(1000, 1)


@pytest.mark.slow
def test_an_exchange_uses_four_fifths_of_a_link_each_way():
    links_or_skip()
    (row,) = exchange.measure(6_000_000, 5, "200mbit")
    assert 0.8 * RATE_MBPS < row.floor_s**-1 * 24.0 < 1.02 * RATE_MBPS, "the link is not what it should be"
    assert row.ratio < 1 / 0.8
    assert row.MBps_each_way > 0.75 * RATE_MBPS  # headers of TCP and Ethernet take 4 %

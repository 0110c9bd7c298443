from __future__ import annotations

from roundelay.cluster.connection_settings import ConnectionSettings


def test_collectives_need_the_loopback_or_a_permission():
    here = ConnectionSettings.on_this_machine()
    assert here.collectives_allowed
    assert not ConnectionSettings(here.security, host="10.0.0.1").collectives_allowed
    assert ConnectionSettings(here.security, host="10.0.0.1", open_collectives=True).collectives_allowed

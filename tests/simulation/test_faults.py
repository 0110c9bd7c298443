"""Random fault schedules on the virtual clock: every invariant holds, and deliberate bugs are caught."""

from __future__ import annotations

import pytest
import torch

from roundelay.cli import main
from roundelay.simulation import faults
from roundelay.simulation.faults import (
    END_S,
    FAULTS_S,
    INVARIANTS,
    MENDED_S,
    FaultWorld,
    Schedule,
    SimulatedFault,
    shrunk,
)
from roundelay.strategies import pair_exchange
from roundelay.strategies.own_exchanges import OwnExchanges
from roundelay.strategies.pair_exchange import AnsweringEnd, CallingEnd


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_schedule_follows_from_its_seed_and_its_faults_end_in_time():
    for seed in range(300):
        schedule = Schedule.drawn(seed)
        assert schedule == Schedule.drawn(seed)
        assert all(0 < fault.at_s <= FAULTS_S and fault.until_s <= MENDED_S < END_S for fault in schedule.faults)
        harmed = {fault.learner for fault in schedule.faults if fault.kind in ("kill", "nan")}
        assert len(harmed) <= schedule.learners - 2
    drawn = {fault.kind for seed in range(50) for fault in Schedule.drawn(seed).faults}
    assert drawn == set(faults.KINDS)


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_invariant_holds(first):
    for seed in range(first, first + (300 if first else 30)):
        schedule = Schedule.drawn(seed)
        assert not FaultWorld(schedule).run(), f"seed {seed}: {schedule}"


def test_equal_schedules_give_equal_bits():
    worlds = [FaultWorld(Schedule.drawn(3)) for _ in range(2)]
    for world in worlds:
        world.run()
    weights = [torch.stack([world._weights(rank) for rank in sorted(world._learners)]) for world in worlds]
    assert torch.equal(*weights)


MUTATIONS = {
    "the caller adds the correction instead of subtracting it": (CallingEnd, "sign", 1.0, "the sum is conserved"),
    "the answering end subtracts": (AnsweringEnd, "sign", -1.0, "the sum is conserved"),
    "the caller drops the reply": (CallingEnd, "apply", lambda end, k: None, "the sum is conserved"),
    "NaN is accepted": (pair_exchange, "all_finite", lambda tensors: True, "weights are finite"),
    "exchanges never start": (OwnExchanges, "_start", lambda self: False, "learners agree"),
}


@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_deliberate_bug_is_caught(monkeypatch, bug):
    where, name, wrong, invariant = MUTATIONS[bug]
    monkeypatch.setattr(where, name, wrong)
    found = set()
    for seed in range(40):
        found |= {violation.partition(":")[0] for violation in FaultWorld(Schedule.drawn(seed)).run()}
        if invariant in found:
            break
    assert invariant in found
    assert found <= INVARIANTS.keys()


def test_a_failure_is_shrunk_to_the_faults_that_it_needs(monkeypatch):
    monkeypatch.setattr(pair_exchange, "all_finite", lambda tensors: True)
    slow = SimulatedFault(1.0, "slow", 1, until_s=3.0)
    schedule = Schedule(0, 3, "complete", 2, 0.01, (slow, SimulatedFault(2.0, "nan", 2)))
    assert [fault.kind for fault in shrunk(schedule).faults] == ["nan"]
    assert str(shrunk(schedule)) == "3 learners, complete, max_lead 2, latency 0.01 s; nan 2 at 2.00 s"


def test_the_command_reports_and_a_failure_prints_the_command_that_replays_it(monkeypatch, capsys):
    assert main(["chaos", "--simulated", "--schedules", "3", "--seed", "7"]) == 0
    assert "3 schedules (seeds 7 to 9)" in capsys.readouterr().out
    monkeypatch.setattr(CallingEnd, "sign", 1.0)
    assert main(["chaos", "--simulated", "--schedules", "3", "--seed", "7"]) == 2
    said = capsys.readouterr()
    assert "schedule: " in said.out
    assert "replay it with: roundelay chaos --simulated --schedules 1 --seed 7" in said.err


@pytest.mark.parametrize(
    "words",
    [
        ["chaos"],
        ["chaos", "tiny", "--schedules", "3"],
        ["chaos", "tiny", "--simulated"],
        ["chaos", "--simulated", "--seed", "x"],
    ],
)
def test_options_that_do_not_go_together_are_refused(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1

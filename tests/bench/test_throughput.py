"""Which cases are measured, and how ratios come out of what learners report; the measuring itself is an integration test."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from roundelay.bench import throughput
from roundelay.bench.cases import Case, make_strategy
from roundelay.bench.local import local_environment
from roundelay.strategies import ADPSGD, DPSGD, Allreduce, DelayByOne


def test_every_size_has_both_rivals_and_all_of_ours():
    cases = throughput.cases_for([1_000_000, 10_000_000])
    for count in (1_000_000, 10_000_000):
        names = [case.strategy for case in cases if case.parameters == count]
        assert names[:2] == ["none", "ddp"]
        assert set(names[2:]) == {"allreduce", "delay-by-one", "dpsgd", "adpsgd"}
    assert {case.step_s for case in cases} == {0.02, 0.2}


def test_with_a_straggler_no_communication_is_measured_without_it_too():
    cases = throughput.cases_for([1_000_000], slow=10.0, slow_learner=2)
    assert [case.slow for case in cases if case.strategy == "none"] == [1.0, 10.0]
    assert all(case.slow_learner == 2 for case in cases)


@pytest.mark.parametrize(
    ("strategy", "kind"), [("allreduce", Allreduce), ("delay-by-one", DelayByOne), ("dpsgd", DPSGD), ("adpsgd", ADPSGD)]
)
def test_a_case_makes_its_strategy(strategy, kind):
    made = make_strategy(Case(strategy, "random-ring", "sockets", 1000, 0.02, 1.0), size=4)
    assert isinstance(made, kind)
    if isinstance(made, DPSGD | ADPSGD):
        assert made.mixing.name == "random-ring"


def test_a_case_survives_json():
    case = throughput.cases_for([1_000_000], slow=10.0)[3]
    assert Case(**json.loads(json.dumps(case.asdict()))) == case


def test_ratios_are_medians_within_repetitions():
    balanced, slow_none, ddp, ours = (
        Case("none", None, None, 10, 0.02, 1.0),
        Case("none", None, None, 10, 0.02, 10.0),
        Case("ddp", None, "gloo", 10, 0.02, 10.0),
        Case("adpsgd", "ring", "sockets", 10, 0.02, 10.0),
    )
    measured = {  # (steps per second of all learners, exchanges per step), three repetitions of a machine that slows down
        balanced: [(400.0, 0), (200.0, 0), (100.0, 0)],
        slow_none: [(310.0, 0), (155.0, 0), (77.5, 0)],
        ddp: [(40.0, 0), (20.0, 0), (10.0, 0)],
        ours: [(300.0, 0.9), (150.0, 1.0), (60.0, 0.8)],
    }
    row = throughput._row(ours, measured, learners=4)
    assert row.ratio_to_ddp == 7.5
    assert row.ratio_to_none == pytest.approx(300 / 310)
    assert row.ratio_to_none_range == pytest.approx((60 / 77.5, 300 / 310))
    assert row.ratio_to_ideal == pytest.approx(0.75 / ((3 + 1 / 10) / 4))
    assert row.exchanges_per_step == 0.9


def test_the_promised_keys_of_a_row():
    promised = {
        "strategy",
        "topology",
        "transport",
        "parameters",
        "slow",
        "total_steps_per_s",
        "ratio_to_none",
        "ratio_to_ddp",
        "ratio_to_ideal",
        "exchanges_per_step",
    }
    assert promised <= {field.name for field in fields(throughput.Row)}


def test_learner_processes_get_what_torchrun_would_set():
    first, second = local_environment(2)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert {first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"]} == {"2"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compute", ["emulated", "lstm"])
def test_a_short_real_run(compute):
    seen = []
    cases = throughput.cases_for([100_000], slow=3.0, compute=compute)
    rows = throughput.run(cases, learners=2, seconds=0.5, repetitions=1, progress=seen.append)
    assert seen == cases
    assert len(rows) == len(cases) - 1  # the balanced reference has no row
    by_name = {(row.strategy, row.topology, row.transport): row for row in rows}
    assert by_name["none", None, None].ratio_to_none == 1.0
    assert by_name["ddp", None, "gloo"].ratio_to_ddp == 1.0
    assert all(row.exchanges_per_step > 0 for row in rows if row.strategy == "adpsgd")
    if compute == "emulated":  # with a straggler nobody who waits can keep up with those who do not
        assert by_name["adpsgd", "random-ring", "shared-memory"].ratio_to_ddp > 1.0

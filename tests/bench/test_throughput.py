"""Which cases are measured, and how rows are computed from what learners report; one short real run."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import pytest

from roundelay.bench import throughput
from roundelay.bench.cases import Case
from roundelay.bench.local import local_environment
from roundelay.bench.throughput import Rates
from roundelay.strategies.registry import strategy_named


def test_every_size_has_both_references_and_all_strategies():
    cases = throughput.cases_for([1_000_000, 10_000_000])
    for count in (1_000_000, 10_000_000):
        names = [case.strategy for case in cases if case.parameters == count]
        assert names[:2] == ["none", "ddp"]
        assert set(names[2:]) == {"allreduce", "delay-by-one", "dpsgd", "adpsgd"}
    assert {case.step_s for case in cases} == {0.02, 0.2}


def test_with_a_straggler_no_communication_is_measured_without_the_straggler_too():
    cases = throughput.cases_for([1_000_000], slow=10.0, slow_learner=2)
    assert [case.slow for case in cases if case.strategy == "none"] == [1.0, 10.0]
    assert all(case.slow_learner == 2 for case in cases)


@pytest.mark.parametrize("case", throughput.STRATEGIES)
def test_every_case_names_a_strategy_that_exists(case):
    assert strategy_named(case.strategy, topology=case.topology, wire=case.wire)


def test_adpsgd_is_measured_through_shared_memory_and_over_sockets_with_and_without_rounding():
    through = {(case.transport, case.wire) for case in throughput.STRATEGIES if case.strategy == "adpsgd"}
    assert through == {("shared-memory", None), ("sockets", None), ("sockets", "bfloat16")}


def test_a_case_survives_json():
    case = throughput.cases_for([1_000_000], slow=10.0)[3]
    assert Case(**json.loads(json.dumps(asdict(case)))) == case


def test_ratios_are_medians_within_repetitions():
    setting = {"parameters": 10, "step_s": 0.02}
    equal = Case("none", **setting)
    none = Case("none", slow=10.0, **setting)
    ddp = Case("ddp", None, "gloo", slow=10.0, **setting)
    ours = Case("adpsgd", "ring", "sockets", slow=10.0, **setting)
    measured = {  # three repetitions on a machine that becomes slower
        equal: [Rates(400.0, 0), Rates(200.0, 0), Rates(100.0, 0)],
        none: [Rates(310.0, 0), Rates(155.0, 0), Rates(77.5, 0)],
        ddp: [Rates(40.0, 0), Rates(20.0, 0), Rates(10.0, 0)],
        ours: [Rates(300.0, 0.9), Rates(150.0, 1.0), Rates(60.0, 0.8)],
    }
    row = throughput._row(ours, measured, learners=4)
    assert row.ratio_to_ddp == 7.5
    assert row.ratio_to_none == pytest.approx(300 / 310)
    assert row.ratio_to_none_range == pytest.approx((60 / 77.5, 300 / 310))
    assert row.ratio_to_ideal == pytest.approx(0.75 / ((3 + 1 / 10) / 4))
    assert row.exchanges_per_step == 0.9


def test_a_row_has_the_documented_keys():
    documented = {
        "strategy",
        "topology",
        "transport",
        "wire",
        "parameters",
        "slow",
        "total_steps_per_s",
        "ratio_to_none",
        "ratio_to_ddp",
        "ratio_to_ideal",
        "exchanges_per_step",
    }
    assert documented <= {field.name for field in fields(throughput.Row)}


def test_learner_processes_get_the_variables_of_torchrun():
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
    assert len(rows) == len(cases) - 1  # the reference without a straggler has no row
    by_name = {row.name: row for row in rows}
    assert by_name["none"].ratio_to_none == 1.0
    assert by_name["ddp (gloo)"].ratio_to_ddp == 1.0
    assert all(row.exchanges_per_step > 0 for row in rows if row.strategy == "adpsgd")
    if compute == "emulated":  # strategies that wait for the straggler are slower
        assert by_name["adpsgd random-ring (shared-memory)"].ratio_to_ddp > 1.0

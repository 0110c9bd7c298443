import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from roundelay.bench import namespaces, network, network_results
from roundelay.bench.network import STRATEGIES, Row, Settings, compared, time_to
from roundelay.cli import main
from roundelay.errors import RoundelayError
from roundelay.strategies.registry import strategy_named

may_make_namespaces = pytest.mark.skipif(
    os.geteuid() != 0
    or subprocess.run(["ip", "netns", "add", "rdlytest"], capture_output=True, check=False).returncode,
    reason="needs root and network namespaces",
)
subprocess.run(["ip", "netns", "del", "rdlytest"], capture_output=True, check=False)


def learner(steps, seconds, nbytes):
    return {"steps": steps, "seconds": seconds, "bytes": nbytes}


def test_a_row_counts_the_steps_of_all_learners():
    row = network._row("1gbit", "fast", [learner(90, 10, 900), learner(70, 10, 700)], [], 0)
    assert (row.steps_per_s, row.bytes_per_step) == (16.0, 10.0)


def rows_of_three():
    none = Row("1gbit", "none", 20.0, 0.0, [(5.0, 9.0), (10.0, 8.0)])
    ddp = Row("1gbit", "ddp", 4.0, 200.0, [(5.0, 3.0), (10.0, 2.0)])
    return [none, ddp, Row("1gbit", "fast", 16.0, 10.0, [(5.0, 2.5), (10.0, 1.5)])]


def test_rows_compare_with_no_communication_and_with_ddps_last_loss_at_the_same_rate():
    none, ddp, fast, alone = compared([*rows_of_three(), Row("50mbit", "fast", 1.0, 10.0, [(5.0, 1.0)])])
    assert (none.ratio_to_none, ddp.ratio_to_none, fast.ratio_to_none) == (1.0, 0.2, 0.8)
    assert (none.ddp_loss_s, ddp.ddp_loss_s, fast.ddp_loss_s) == (None, 10.0, 7.5)
    assert (alone.ratio_to_none, alone.ddp_loss_s) == (None, None)


def test_seeds_are_compared_apart_and_kept_apart(tmp_path):
    path, settings = tmp_path / "network.json", Settings(["1gbit"], compute="language")
    network_results.add(path, settings, rows_of_three(), {})
    second = [replace(row, seed=1, steps_per_s=row.steps_per_s / 2, losses=[(4.0, 2.0)]) for row in rows_of_three()]
    found = network_results.add(path, replace(settings, seed=1), second, {})
    assert [(row.strategy, row.seed, row.ratio_to_none, row.ddp_loss_s) for row in found if row.strategy != "none"] == [
        ("ddp", 0, 0.2, 10.0),
        ("fast", 0, 0.8, 7.5),
        ("ddp", 1, 0.2, 4.0),
        ("fast", 1, 0.8, 4.0),
    ]


def test_a_file_of_results_grows_piece_by_piece(tmp_path):
    path, settings = tmp_path / "network.json", Settings(["1gbit"], compute="language")
    none, ddp, fast = rows_of_three()
    network_results.add(path, settings, [none, replace(fast, steps_per_s=1.0)], {"command": "first"})
    found = network_results.add(path, settings, [ddp, fast], {"command": "second"})
    assert {row.strategy: row.ratio_to_none for row in found} == {"none": 1.0, "fast": 0.8, "ddp": 0.2}
    assert [row.ddp_loss_s for row in found if row.strategy == "fast"] == [7.5]
    assert [row.steps_per_s for row in network_results.read(path)] == [20.0, 16.0, 4.0]
    slower = compared([replace(none, steps_per_s=10.0), replace(fast, steps_per_s=9.0)])
    assert [row.ratio_to_none for row in network_results.add(path, settings, slower, {})] == [1.0, 0.9, 0.2]
    assert json.loads(path.read_text())["pieces"][:2] == [{"command": "first"}, {"command": "second"}]
    with pytest.raises(RoundelayError, match="name another file"):
        network_results.add(path, replace(settings, slow=5.0), [ddp], {})


@pytest.mark.parametrize(
    ("curve", "expected"),
    [([(1.0, 1.5)], 1.0), ([(1.0, 4.0), (2.0, 3.0)], None), ([(1.0, 4.0), (2.0, 2.0), (3.0, 5.0)], 2.0), ([], None)],
)
def test_time_to_a_loss(curve, expected):
    assert time_to(2.0, curve) == expected


def test_every_line_names_a_strategy_and_options_that_it_takes():
    settings = Settings(["none"], every=7, seed=3)
    for strategy in STRATEGIES:
        case = settings.case(strategy)
        assert json.loads(json.dumps(case))["seed"] == 3
        if strategy.name not in ("none", "ddp"):
            made = strategy_named(case["strategy"], **case["options"])
            assert all(getattr(made, name) == value for name, value in case["options"].items() if name != "topology")


def test_without_root_there_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: "/sbin/" + tool)
    assert main(["bench", "network"]) != 0
    assert capsys.readouterr().err.strip().count("\n") == 0


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(RoundelayError, match="needs tc; install iproute2"):
        namespaces.check_available()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rates", "fast"], "needs rates such as none,1gbit,200mbit"),
        (["--strategies", "dpsg"], "unknown strategy 'dpsg'"),
        (["--learners", "1"], "needs 2 to 64 learners"),
    ],
)
def test_wrong_options(options, message, capsys, monkeypatch):
    monkeypatch.setattr(namespaces, "check_available", lambda: None)
    try:
        code = main(["bench", "network", *options])
    except SystemExit as exit:
        code = exit.code
    assert code != 0
    assert message in capsys.readouterr().err


SEND = "import socket; socket.create_connection(('{}', 5555)).sendall(bytes({}))"
RECEIVE = """
import socket, time
server = socket.create_server(("{}", 5555))
print("listening", flush=True)
connection, _ = server.accept()
received, began = 0, None
while data := connection.recv(2**20):
    began = began or time.perf_counter()
    received += len(data)
print(8e-6 * received / (time.perf_counter() - began))
"""


@may_make_namespaces
def test_two_machines_are_joined_by_a_link_of_the_given_rate_and_are_gone_afterwards():
    with namespaces.machines(2) as (first, second):
        for machine in (first, second):
            namespaces.shape(machine, "20mbit")
        command = first.command([sys.executable, "-c", RECEIVE.format(first.address)])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            receiver.stdout.readline()
            code = SEND.format(first.address, 5_000_000)
            subprocess.run(second.command([sys.executable, "-c", code]), check=True, timeout=60)
            rate_mbit = float(receiver.stdout.readline())
    assert rate_mbit == pytest.approx(19, rel=0.2)
    assert not {first.name, second.name} & set(machine_names())


KILLED = """
import os, signal, subprocess, sys
from roundelay.bench import namespaces
with namespaces.machines(2) as (first, second):
    subprocess.Popen(first.command(["sh", "-c", "echo started; sleep 100"]), stdout=sys.stdout)
    print(first.name, second.name, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@may_make_namespaces
def test_a_killed_benchmark_leaves_no_process_and_its_machines_are_removed_at_the_next_start():
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        lines = [killed.stdout.readline() for _ in range(2)]
        killed.stdin.write("\n")
        killed.stdin.close()
        assert killed.stdout.read() == ""  # ends when the last process that has the pipe has ended
    (names,) = (line.split() for line in lines if line != "started\n")
    assert set(names) <= set(machine_names())
    with namespaces.machines(1) as (machine,):
        assert not set(names) & set(machine_names())
        assert machine.name in machine_names()


def machine_names():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


@may_make_namespaces
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strategies_are_measured_on_two_machines():
    settings = Settings(
        ["100mbit"],
        strategies=[each for each in STRATEGIES if each.label in ("none", "ddp", "local-sgd pairs int8")],
        learners=2,
        seconds=4.0,
        parameters=1_000_000,
        step_s=0.05,
        every=10,
    )
    none, ddp, local = network.run(settings)
    assert none.bytes_per_step < 1000
    assert ddp.bytes_per_step == pytest.approx(4e6, rel=0.1)
    assert 0.03e6 < local.bytes_per_step < 0.2e6
    assert local.steps_per_s > ddp.steps_per_s

"""`roundelay bench exchange`: options, table and JSON; nothing is measured."""

import json

import pytest

from roundelay.bench import exchange
from roundelay.cli import main

ROWS = [
    exchange.Row("tcp", 43_000_000, 0.122, 0.0934, 1.31, 1410.0),
    exchange.Row("shared memory", 43_000_000, 0.0512, 0.0179, 2.78, 3359.0),
]


@pytest.fixture
def asked(monkeypatch):
    """What the command asks for."""
    calls = []

    def measure(parameters, repetitions, rate, progress):
        calls.append((parameters, repetitions, rate))
        progress("tcp")
        return ROWS

    monkeypatch.setattr(exchange, "measure", measure)
    return calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--parameters 10", "at least 1000, such as 43M or 500K, got '10'"),
        ("--parameters many", "got 'many'"),
        ("--repetitions 0", "needs a whole number of at least 1, got '0'"),
        ("--rate fast", "needs a rate of tc, such as 200mbit or 1gbit, got 'fast'"),
        ("--rate 0mbit", "got '0mbit'"),
        ("--learners 4", "unrecognized arguments: --learners 4"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_measured(words, message, asked, capsys):
    assert main(["bench", "exchange", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert asked == []


def test_by_default_it_measures_the_papers_model(asked, capsys):
    main(["bench", "exchange"])
    assert asked == [(43_000_000, 9, None)]
    shown = capsys.readouterr().out
    for figure in ("tcp", "shared memory", "43 M", "0.1220 s", "0.0934 s", "1.31", "1410", "floor: the same bytes"):
        assert figure in shown


def test_json_has_the_rows_the_command_and_the_machine(asked, capsys):
    main(["bench", "exchange", "--parameters", "2M", "--repetitions", "3", "--rate", "200mbit", "--json"])
    assert asked == [(2_000_000, 3, "200mbit")]
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"rows", "repetitions", "command", "machine"}
    assert document["rows"][0] == {
        "medium": "tcp",
        "parameters": 43_000_000,
        "exchange_s": 0.122,
        "floor_s": 0.0934,
        "ratio": 1.31,
        "MBps_each_way": 1410.0,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "9 exchanges by tcp and shared memory: about 18 s on an idle machine"),
        ("--parameters 10M --rate 200mbit", "9 exchanges by tcp over 200mbit: about 40 s on an idle machine"),
        ("--parameters 43M --rate 100mbit", "about 5 minutes"),
    ],
)
def test_it_says_beforehand_how_long_it_takes(words, said, asked, capsys):
    main(["bench", "exchange", *words.split()])
    assert said in " ".join(capsys.readouterr().err.split())

"""The public names: exports, commands and options. A new name is a decision that is made here."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest

import roundelay
from roundelay.cli import COMMANDS, all_commands, build_parser

NAMES = [
    "ADPSGD",
    "Allreduce",
    "DPSGD",
    "DelayByOne",
    "ElasticSampler",
    "Learner",
    "LocalSGD",
    "Mixing",
    "PeerLostError",
    "Rendezvous",
    "RoundelayError",
    "Strategy",
    "StrategyError",
    "SuperLearner",
    "Task",
    "TaskConfig",
    "Ticket",
    "TopologyError",
    "World",
    "base_graph",
    "complete",
    "exponential",
    "from_graph",
    "from_matrix",
    "hypercube",
    "init",
    "join",
    "odd_even_ring",
    "one_peer_exponential",
    "random_matching",
    "random_ring",
    "ring",
    "spectral_gap",
    "spectrum",
    "star",
    "torus",
    "whole_state",
]
CONFIGURATION = [
    "--learners",
    "--strategy",
    "--topology",
    "--group-size",
    "--epochs",
    "--seed",
    "--slow",
    "--data",
    "--set",
]
THROUGHPUT = ["--learners", "--parameters", "--compute", "--seconds", "--repetitions", "--plot"]
FLAGS = {
    "train": [
        "RECIPE",
        *CONFIGURATION,
        "--out",
        "--resume",
        "--join",
        "--rendezvous",
        "--here",
        "--host",
        "--secret-file",
        "--tls",
        "--open-collectives",
        "--json",
        "--show-config",
    ],
    "evaluate": ["RUN", "--split", "--corpus", "--passes", "--json"],
    "report": ["RUN", "--out"],
    "topology": ["NAME", "--learners", "--seed", "--degree", "--draw", "--plot", "--json"],
    "plan": [
        "--learners",
        "--model-bytes",
        "--step-time",
        "--step-spread",
        "--slowest-factor",
        "--bandwidth",
        "--latency",
        "--group-size",
        "--group-bandwidth",
        "--epoch-steps",
        "--papers",
        "--plot",
        "--json",
    ],
    "bench throughput": [*THROUGHPUT, "--json"],
    "bench stragglers": [*THROUGHPUT, "--slow", "--json"],
    "bench overhead": ["--learners", "--seconds", "--json"],
    "bench accelerator": [
        "--learners",
        "--parameters",
        "--step",
        "--bandwidth",
        "--seconds",
        "--repetitions",
        "--json",
    ],
    "bench network": [
        "--learners",
        "--rates",
        "--compute",
        "--data",
        "--strategies",
        "--every",
        "--slow",
        "--seed",
        "--seconds",
        "--into",
        "--plot",
        "--json",
    ],
    "bench exchange": ["--parameters", "--repetitions", "--rate", "--json"],
    "bench speech": ["--run", "--seconds", "--hours", "--json"],
    "chaos": [
        "RECIPE",
        *CONFIGURATION,
        "--kill",
        "--freeze",
        "--join",
        "--campaign",
        "--every",
        "--simulated",
        "--schedules",
        "--out",
        "--json",
    ],
    "launch": [
        "--learners",
        "--min-learners",
        "--restarts",
        "--logs",
        "--rendezvous",
        "--here",
        "--host",
        "--secret-file",
        "--tls",
        "--open-collectives",
        "-m",
        "SCRIPT",
        "...",
    ],
    "rendezvous": ["--port", "--host", "--secret-file", "--tls", "--open-collectives"],
    "simulate": [
        "RECIPE",
        *CONFIGURATION,
        "--step-time",
        "--step-spread",
        "--times-of",
        "--network",
        "--node-size",
        "--inside-bandwidth",
        "--out",
        "--json",
    ],
    "speech corpus": [
        "KIND",
        "DIR",
        "--data",
        "--out",
        "--hours",
        "--seed",
        "--noise",
        "--telephone",
        "--workers",
        "--allow-pipes",
        "--quick",
        "--json",
    ],
    "speech transcribe": ["RUN", "FILE", "--one-speaker", "--passes", "--json"],
    "speech align": ["RUN", "--corpus", "--out"],
    "reproduce": ["CLAIM", "--seeds", "--first-seed", "--out", "--json"],
    "completion": ["SHELL"],
}


def test_the_exported_names():
    assert roundelay.__all__ == NAMES
    assert dir(roundelay) == sorted([*NAMES, "__version__"])


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_exists_and_is_documented(name):
    assert getattr(roundelay, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'roundelay' has no attribute 'rnig'"):
        _ = roundelay.rnig


def test_the_stub_for_type_checkers_has_the_same_names_from_the_same_modules():
    stub = ast.parse(Path(roundelay.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    stubbed = {alias.asname: node.module for node in imports for alias in node.names}
    assert stubbed == roundelay._MODULE_OF
    assert all(alias.name == alias.asname for node in imports for alias in node.names)


PARSERS = all_commands(build_parser())


def test_the_commands():
    assert list(dict.fromkeys(name.split()[0] for name in PARSERS)) == list(COMMANDS)
    assert set(PARSERS) == set(FLAGS)


@pytest.mark.parametrize("command", PARSERS)
def test_the_options_of_a_command(command):
    actions = [action for action in PARSERS[command]._actions if not isinstance(action, argparse._HelpAction)]
    names = [action.option_strings[0] if action.option_strings else action.metavar for action in actions]
    assert names == FLAGS[command]
    assert all(action.help for action in actions)

"""Training needs torch, numpy, safetensors, rich and shtab only; everything else is an extra that a message names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

BLOCKED = """
import sys

HIDDEN = ("scipy", "networkx", "sklearn", "matplotlib", "plotly", "lightning", "transformers", "accelerate", "ray")

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
TRAINING = """
import torch
import roundelay
from roundelay.topology import TOPOLOGIES, named

assert len(roundelay.random_ring(8).row(0)) == 3
for name in TOPOLOGIES:
    for round in range(4):
        mixing = named(name, 8)
        assert abs(sum(mixing.row(0, round).values()) - 1) < 1e-9
        mixing.partner(0, round)
ring = roundelay.ring(1)
strategies = [roundelay.Allreduce(), roundelay.DPSGD(ring), roundelay.ADPSGD(ring), roundelay.DelayByOne()]
for strategy in [*strategies, roundelay.SuperLearner(roundelay.ADPSGD(ring), group_size=1)]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with roundelay.Learner(model, optimizer, strategy):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert not torch.equal(model.weight, before)
assert roundelay.spectral_gap(roundelay.base_graph(12)) == 1
print("trained")
"""


def run(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_training_and_small_spectra_need_no_extra():
    assert run(TRAINING) == "trained"


def test_a_comparison_leaves_out_what_needs_an_extra():
    said = run("from roundelay.cli import main\nassert main(['topology', 'compare', '--learners', '1100']) == 0\n")
    assert "random-ring" in said
    assert "pip install 'roundelay[analysis]'" in " ".join(said.split())


@pytest.mark.parametrize(
    ("feature", "says"),
    [
        ("import roundelay; roundelay.spectrum(roundelay.base_graph(1100))", "spectrum of .* more than 1024 learners"),
        ("from roundelay.topology import family; family('g.edgelist')", "reading a graph from a file"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(feature, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.edgelist").write_text("0 1\n")
    said = run(
        f"from roundelay.errors import MissingExtraError\ntry:\n    {feature}\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    assert "\n" not in said
    assert said.endswith("needs the 'analysis' extra; install it with: pip install 'roundelay[analysis]'")
    assert re.search(says, said)


def test_an_integration_names_its_extra():
    said = run("""
import importlib
for name in ("accelerate", "lightning", "ray", "transformers"):
    try:
        importlib.import_module(f"roundelay.integrations.{name}")
    except ImportError as error:
        print(error)
""")
    assert said.splitlines() == [
        f"{what} needs the '{name}' extra; install it with: pip install 'roundelay[{name}]'"
        for what, name in [
            ("training with Accelerate", "accelerate"),
            ("training with Lightning", "lightning"),
            ("running learners on Ray", "ray"),
            ("training with Hugging Face's Trainer", "transformers"),
        ]
    ]


def test_the_dependencies_are_what_a_training_loop_and_the_command_line_import():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = [line.partition(">")[0] for line in project["dependencies"]]
    assert names == ["numpy", "rich", "safetensors", "shtab", "torch"]

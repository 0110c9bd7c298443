"""Draw the pictures of README and docs again, each with the command that a reader would type."""

from __future__ import annotations

import shlex
from pathlib import Path

from roundelay.cli import main

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
COMMANDS = {
    "gaps.svg": "topology compare --learners 64 --plot",
    "ring.svg": "topology ring --learners 16 --draw",
    "random-ring.svg": "topology random-ring --learners 16 --draw",
    "torus.svg": "topology torus --learners 16 --draw",
    "exponential.svg": "topology exponential --learners 16 --draw",
    "one-peer-exponential.svg": "topology one-peer-exponential --learners 16 --draw",
    "base-graph.svg": "topology base-graph --learners 12 --draw",
}

for name, command in COMMANDS.items():
    code = main([*shlex.split(command), str(FOLDER / name)])
    if code:
        raise SystemExit(code)

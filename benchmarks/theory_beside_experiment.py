"""The plot of docs/simulation.md: what theory predicts of spread, stability and staleness, beside runs of the strategies.

python benchmarks/theory_beside_experiment.py out/theory.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from roundelay.reports.plots.reproduce import plot_panels
from roundelay.simulation.theory import panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    plot_panels(panels(range(arguments.seeds)), arguments.picture)


if __name__ == "__main__":
    main()

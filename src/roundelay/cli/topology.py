"""`roundelay topology`: what theory says about one topology, or about all of them side by side."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from roundelay.cli.arguments import known, picture_path, positive_int, whole_number
from roundelay.cli.tables import new_table, say, show, text
from roundelay.errors import MissingExtraError, TopologyError
from roundelay.topology import TOPOLOGIES, Mixing, Spectrum, every, family, spectrum
from roundelay.topology.registry import OneSize
from roundelay.topology.traffic import sends_in, sends_per_round

MOST_LEARNERS = 1_000_000  # a spectrum of more learners takes too much memory
COMPARED = {
    "name": "topology",
    "spectral_gap": "spectral\ngap",
    "exact_after": "exact\nafter",
    "sends_per_round": "sends\na round",
    "rounds_to_1_percent": "rounds\nto 1 %",
    "sends_to_1_percent": "sends\nto 1 %",
    "stationary_variance": "variance\n(ασ)²",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    name = add(
        "name",
        metavar="NAME",
        help=f"'compare' for all topologies; the name of one ({', '.join(TOPOLOGIES)}); a file with a mixing matrix "
        "(.npy, .csv) or a graph (.edgelist, .graphml); or module:function, where function(N) returns a Mixing",
    )
    known(name, ("compare", *TOPOLOGIES))
    add("--learners", type=positive_int, metavar="N", help="number of learners; not needed with a file")
    add("--seed", type=whole_number, default=0, metavar="S", help="seed of random topologies (default 0)")
    add(
        "--degree",
        type=positive_int,
        metavar="K",
        help="degree of base-graph, below the number of learners (default 1)",
    )
    add("--draw", type=picture_path, metavar="FILE", help="draw the graph (.svg, .png, .pdf)")
    add("--plot", type=picture_path, metavar="FILE", help="with compare: plot the gap against the number of learners")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Print the figures of one topology, or of all."""
    if (args.learners or 0) > MOST_LEARNERS:
        raise TopologyError(f"figures are computed for at most {MOST_LEARNERS} learners, got {args.learners}")
    if args.degree is not None and args.name not in ("compare", "base-graph"):
        raise TopologyError(f"--degree is for base-graph and compare; {args.name} has no degree to choose")
    if args.degree is not None and args.learners is not None and args.degree >= args.learners:
        raise TopologyError(f"--degree must be below the {args.learners} learners, got {args.degree}")
    args.degree = args.degree or 1
    if args.name == "compare":
        _compare(args)
    elif args.plot:
        raise TopologyError("--plot goes with `topology compare`; use --draw for a picture of one topology")
    else:
        _show_one(args)


def describe(mixing: Mixing, found: Spectrum) -> dict[str, Any]:
    """The figures of one topology under their names in the JSON output."""
    rounds = found.rounds_to_1_percent
    return {
        "name": mixing.name,
        "learners": mixing.size,
        "spectral_gap": found.gap,
        "spectral_gap_kind": found.kind,
        "spectral_gap_error": found.gap_error,
        "lambda_min": found.lambda_min,
        "exact_after": found.exact_after,
        "sends_per_round": sends_per_round(mixing),
        "rounds_to_1_percent": rounds,
        "sends_to_1_percent": None if rounds is None else sends_in(mixing, rounds),
        "stationary_variance": found.stationary_variance,
    }


def _show_one(args: argparse.Namespace) -> None:
    mixing = _mixing(args)
    found = spectrum(mixing)
    figures = describe(mixing, found)
    if args.draw:
        from roundelay.reports.plots.topology import draw_topology

        draw_topology(mixing, args.draw)
    if args.json:
        print(json.dumps(figures, indent=2))
        return
    rows = {key.replace("_", " "): text(value) for key, value in figures.items() if key not in ("name", "learners")}
    if found.stationary_variance_error is not None:
        rows["stationary variance"] += f" (estimated, standard error {found.stationary_variance_error:.2g})"
    table = new_table(f"{mixing.name}, {_learners(mixing.size)}", header=False)
    for label, value in rows.items():
        table.add_row(label, value)
    bound = 1 + found.lambda_min
    table.add_row("stable for lr × curvature below", f"{bound:.4g} without momentum, {1.9 * bound:.4g} with 0.9")
    show(table)
    if args.draw:
        print(f"drawn to {args.draw}")


def _mixing(args: argparse.Namespace) -> Mixing:
    chosen = family(args.name, seed=args.seed, degree=args.degree)
    size = args.learners or (chosen.mixing.size if isinstance(chosen, OneSize) else None)
    if size is None:
        raise TopologyError(f"topology {args.name} needs --learners N")
    return chosen(size)


def _compare(args: argparse.Namespace) -> None:
    if args.learners is None:
        raise TopologyError("topology compare needs --learners N")
    if args.draw:
        raise TopologyError("--draw goes with one topology; `topology compare` takes --plot")
    mixings, refused = every(args.learners, args.seed, args.degree)
    rows = []
    with Console(stderr=True).status("") as status:
        for mixing in mixings:
            status.update(f"{mixing.name}: computing eigenvalues, which takes seconds for 1,000 learners")
            try:
                rows.append(describe(mixing, spectrum(mixing)))
            except (TopologyError, MissingExtraError) as error:
                refused[mixing.name] = str(error)
    rows.sort(key=lambda row: -row["spectral_gap"])
    if args.plot:
        from roundelay.reports.plots.topology import plot_gaps

        plot_gaps(args.learners, args.plot, seed=args.seed, degree=args.degree)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    table = new_table(f"{_learners(args.learners)}, widest gap first")
    for column, heading in COMPARED.items():
        table.add_column(heading, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(text(row[column]) for column in COMPARED))
    show(table)
    for reason in refused.values():
        say(f"left out: {reason}")
    if args.plot:
        print(f"plotted to {args.plot}")


def _learners(count: int) -> str:
    return f"{count} learner{'s' if count > 1 else ''}"

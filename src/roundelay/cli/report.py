"""`roundelay report`: one HTML page about one run or several."""

from __future__ import annotations

import argparse
from pathlib import Path

from roundelay.cli.arguments import output_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="the directory of a run; several runs are compared")
    add(
        "--out",
        type=lambda text: output_path(text, (".html", ".htm")),
        default=Path("report.html"),
        metavar="FILE",
        help="the HTML file to write (default report.html)",
    )


def run(args: argparse.Namespace) -> None:
    """Write the page, and print the sentence that it begins with, and its path."""
    from roundelay.reports.pages import write_report

    sentence = write_report(args.runs, args.out)
    if sentence:
        print(sentence)
    print(f"report: {args.out}")

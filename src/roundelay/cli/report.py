"""`roundelay report`: one HTML page about one run or several."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="the directory of a run; several runs are compared")
    add(
        "--out",
        type=_page,
        default=Path("report.html"),
        metavar="FILE",
        help="the HTML file to write (default report.html)",
    )


def run(args: argparse.Namespace) -> None:
    """Write the page and print its path."""
    from roundelay.reports.pages import write_report

    write_report(args.runs, args.out)
    print(f"report: {args.out}")


def _page(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"needs a file name that ends in .html, got '{text}'")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write '{text}': there is no folder '{path.parent}'; make it first")
    return path

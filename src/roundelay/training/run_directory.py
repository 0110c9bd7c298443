"""The directory of a run: its files, and how to begin it.

config.toml         the whole configuration           machine.json    the machine, the time and the command
metrics.jsonl       see `metrics`                     logs/           the output of every learner
checkpoints/        see `checkpoint`                  results.json    at the end: the figures of the mean model
model.safetensors   at the end: the mean model        config.json     at the end: what is needed to build it again
ticket.json         for learners that join: the address of the rendezvous and the secret; only its owner can read it
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundelay.cluster.ticket import Ticket
from roundelay.errors import ConfigError, LaunchError
from roundelay.training import checkpoint
from roundelay.training.config import Config
from roundelay.training.config_table import to_toml
from roundelay.training.metrics import rows_of
from roundelay.training.recipes import as_table, read_toml

CONFIG, MACHINE, METRICS, TICKET = "config.toml", "machine.json", "metrics.jsonl", "ticket.json"
RESULTS, MODEL, MODEL_CONFIG = "results.json", "model.safetensors", "config.json"
MODEL_PLACE = "model"  # in results.json of a machine without the model: the host and the directory that have it
PROBLEMS = "problems.txt"  # problems in the data, one per line; only written by tasks that find any


def begin(folder: Path, config: Config, command: str, *, simulated: bool = False) -> None:
    """Begin a new run; machine.json says if it is a simulated one.

    A run that ended before its first row of metrics has nothing to lose: it is begun again.

    Raises ConfigError if the folder holds a run already.
    """
    if (folder / CONFIG).exists():
        if _has_begun(folder):
            raise ConfigError(f"'{folder}' holds a run already; go on with it by --resume, or choose another --out")
        (folder / METRICS).unlink(missing_ok=True)
    make(folder)
    write(folder, config, command, simulated=simulated)


def _has_begun(folder: Path) -> bool:
    """Whether a run has left a checkpoint, a result, or a row of metrics that is no event."""
    left = [*folder.glob("checkpoints/*"), *folder.glob(RESULTS)]
    rows = (
        row for path in folder.glob("metrics*.jsonl") for row in rows_of(path.read_text(errors="replace").splitlines())
    )
    return bool(left) or any(row["kind"] != "event" for row in rows)


def write(folder: Path, config: Config, command: str, *, simulated: bool = False) -> None:
    """Write the configuration, and a description of the machine, when a run begins or resumes."""
    described = machine() | {"command": command} | ({"simulated": True} if simulated else {})
    checkpoint.write_whole(folder / CONFIG, to_toml(as_table(config)).encode())
    checkpoint.write_whole(folder / MACHINE, json.dumps(described, indent=2).encode())


def set_results_aside(folder: Path) -> None:
    """A run that goes on has no results yet. Those of its end before this one stay in results.previous.json."""
    results = folder / RESULTS
    if results.exists():
        results.replace(results.with_name("results.previous.json"))


def wait_for_config(folder: Path, patience_s: float = 10.0) -> None:
    """Wait until the machine that begins the run in `folder` has written the configuration. `table` raises if it has not."""
    deadline = time.monotonic() + patience_s
    while not (folder / CONFIG).exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def make(folder: Path) -> None:
    """Make the folders of a run. Raises ConfigError if that is not possible."""
    try:
        for each in (folder / "logs", folder / "checkpoints"):
            each.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder '{folder}': {error.strerror}; choose another --out") from None


def ticket(folder: Path) -> Ticket:
    """The ticket of the run under way in `folder`. Only the fields of a ticket are read: another user may have prepared it.

    Raises ConfigError if the run in `folder` is not under way, or if the file is no ticket.
    """
    path = folder / TICKET
    if not path.is_file():
        raise ConfigError(f"'{folder}' has no run under way that can be joined: there is no {TICKET}")
    try:
        found = Ticket.parse(str(path))
        found.credentials()
    except LaunchError as error:
        raise ConfigError(f"'{path}' cannot be used to join a run: {error}") from None
    return found


def table(folder: Path) -> dict[str, Any]:
    """The configuration of the run in `folder`, as plain values. Raises ConfigError if there is none."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"there is no run in '{folder}' to resume; start one without --resume")
    return read_toml(folder / CONFIG)


def machine() -> dict[str, Any]:
    """What is known about this machine and this installation."""
    import torch

    from roundelay import __version__, devices

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "hostname": platform.node(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "accelerators": devices.names(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "roundelay": __version__,
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def resume_command(folder: Path, options: Sequence[str] = ()) -> str:
    """The command that resumes the run in `folder` from its newest checkpoint, from the same working directory.

    The directory holds the whole configuration, so no other option of the first command is needed, except those with
    which learners on several machines find each other (`options`).

    >>> resume_command(Path("runs/my run"))
    "roundelay train --out 'runs/my run' --resume"
    """
    return shlex.join(["roundelay", "train", "--out", str(folder), *options, "--resume"])

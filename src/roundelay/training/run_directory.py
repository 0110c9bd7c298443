"""The directory of a run: its files, and how to begin it.

config.toml         the whole configuration           machine.json    the machine, the time and the command
metrics.jsonl       see `metrics`                     logs/           the output of every learner
checkpoints/        see `checkpoint`                  results.json    at the end: the figures of the mean model
model.safetensors   at the end: the mean model        config.json     at the end: what is needed to build it again
rendezvous.json     the address of the rendezvous and the secret of the run; only the owner of the file can read it
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

from roundelay.errors import ConfigError
from roundelay.training import checkpoint
from roundelay.training.config import Config
from roundelay.training.config_table import to_toml
from roundelay.training.recipes import as_table, read_toml
from roundelay.transport.security import KEYS, Security

CONFIG, MACHINE, METRICS, RENDEZVOUS = "config.toml", "machine.json", "metrics.jsonl", "rendezvous.json"
RESULTS, MODEL, MODEL_CONFIG = "results.json", "model.safetensors", "config.json"
PROBLEMS = "problems.txt"  # problems in the data, one per line; only written by tasks that find any


def begin(folder: Path, config: Config, command: str) -> None:
    """Begin a new run. Raises ConfigError if the folder holds a run already."""
    if (folder / CONFIG).exists():
        raise ConfigError(f"'{folder}' holds a run already; go on with it by --resume, or choose another --out")
    _make(folder)
    write(folder, config, command)


def write(folder: Path, config: Config, command: str) -> None:
    """Write the configuration, and a description of the machine, when a run begins or resumes."""
    checkpoint.write_whole(folder / CONFIG, to_toml(as_table(config)).encode())
    checkpoint.write_whole(folder / MACHINE, json.dumps(machine() | {"command": command}, indent=2).encode())


def _make(folder: Path) -> None:
    try:
        for each in (folder / "logs", folder / "checkpoints"):
            each.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder '{folder}': {error.strerror}; choose another --out") from None


def write_rendezvous(folder: Path, address: tuple[str, int], security: Security) -> None:
    """Write where the rendezvous is, and the secret that learners need to join the run."""
    document = {"address": "{}:{}".format(*address)} | security.environment()
    path = folder / RENDEZVOUS
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(document, file, indent=2)


def read_rendezvous(folder: Path) -> tuple[str, Security]:
    """The address of the rendezvous, and the secret of the run.

    Only the keys that `write_rendezvous` writes are read, because another user may have prepared the file.

    Raises ConfigError if the run in `folder` is not under way, or if the file has no secret.
    """
    path = folder / RENDEZVOUS
    try:
        document = json.loads(path.read_text())
        address = str(document["address"])
        security = Security.from_environment({name: str(document[name]) for name in KEYS if name in document})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"'{folder}' has no run under way that can be joined: {error}") from None
    if security is None:
        raise ConfigError(f"'{path}' has no secret, so its run cannot be joined")
    return address, security


def table(folder: Path) -> dict[str, Any]:
    """The configuration of the run in `folder`, as plain values. Raises ConfigError if there is none."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"there is no run in '{folder}' to resume; start one without --resume")
    return read_toml(folder / CONFIG)


def machine() -> dict[str, Any]:
    """What is known about this machine and this installation."""
    import torch

    from roundelay import __version__

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "hostname": platform.node(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
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

"""Chaos: a real run with faults, beside the same run without. A fault kills or freezes a learner, or lets one join."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from roundelay.bench.fault_outcome import outcome
from roundelay.cluster.launcher import Launcher
from roundelay.errors import ConfigError, RoundelayError
from roundelay.training import run_directory
from roundelay.training.config import Config
from roundelay.training.metrics import read_rows
from roundelay.training.open_files import allow_open_files
from roundelay.training.supervisor import Supervisor

ROW_EVERY_S = 0.2  # how often a learner writes a row of metrics: often enough to see a stall
TRAINS_S = 2.0  # a learner that has written a row so recently trains
_GRAMMAR = re.compile(r"(\d+)@(\d+(?:\.\d+)?)s?(?::(\d+(?:\.\d+)?)s?)?")


@dataclass(frozen=True, order=True)
class Fault:
    """What happens to a learner.

    Attributes:
        at_s: seconds after the first row of metrics of the run.
        learner: its id.
        kind: kill, freeze or join.
        duration_s: how long a freeze lasts.
    """

    at_s: float
    learner: int
    kind: str
    duration_s: float | None = None

    @classmethod
    def parsed(cls, kind: str, text: str) -> Fault:
        """Parse LEARNER@TIME, or LEARNER@TIME:DURATION for a freeze. Raises ConfigError for anything else.

        >>> Fault.parsed("freeze", "1@30s:20s")
        Fault(at_s=30.0, learner=1, kind='freeze', duration_s=20.0)
        """
        match = _GRAMMAR.fullmatch(text)
        lasts = kind == "freeze"
        if match is None or (match[3] is None) == lasts:
            form = "LEARNER@TIME:DURATION, such as 1@30s:20s" if lasts else "LEARNER@TIME, such as 2@20s"
            raise ConfigError(f"--{kind} needs {form}, got '{text}'")
        return cls(float(match[2]), int(match[1]), kind, float(match[3]) if lasts else None)

    def __str__(self) -> str:
        duration = "" if self.duration_s is None else f":{self.duration_s:g}s"
        return f"--{self.kind} {self.learner}@{self.at_s:g}s{duration}"


class FaultInjector:
    """Carries out faults when they are due. The launcher calls it a few times a second.

    Args:
        faults: in any order.
        metrics: the metrics file of the run; its first row of a learner starts the clock.
        patient: the clock stands still while a kill or freeze is due that no learner would survive: a fault waits until
            another learner has written a row in the last `TRAINS_S`.

    Attributes:
        happened: seconds of the run at which each fault was carried out.
        impossible: faults that could not be carried out, with the reason.
        left: faults that are not due yet; after the run, the faults that were due only after its end.
    """

    def __init__(self, faults: Iterable[Fault], metrics: Path, *, patient: bool = False) -> None:
        self.left, self._metrics, self._patient = sorted(faults), metrics, patient
        self.happened: dict[Fault, float] = {}
        self.impossible: dict[Fault, str] = {}
        self._frozen: list[tuple[float, int]] = []  # when to wake which learner
        self._began: float | None = None
        self._first_row_s = self._waited_s = 0.0
        self._read_bytes = 0
        self._trained_at: dict[int, float] = {}  # when a learner's last row was seen

    def __call__(self, launcher: Launcher) -> None:
        """Carry out what is due now."""
        if self._began is None:
            rows = read_rows(self._metrics) if self._metrics.exists() else iter(())
            first = next((row for row in rows if row["kind"] == "learner"), None)
            if first is None:
                return
            self._began, self._first_row_s = time.monotonic(), first["elapsed_s"]
        elapsed = time.monotonic() - self._began
        while self.left and self.left[0].at_s <= elapsed - self._waited_s:
            if self._patient:
                if not self._survivable(self.left[0]):
                    break
                self._waited_s = elapsed - self.left[0].at_s
            self._carry_out(self.left.pop(0), launcher, elapsed)
        for frozen in [frozen for frozen in self._frozen if frozen[0] <= elapsed]:
            self._frozen.remove(frozen)
            launcher.send(frozen[1], signal.SIGCONT)

    def _survivable(self, fault: Fault) -> bool:
        """Whether a learner that the fault does not harm trains now."""
        with self._metrics.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                row = json.loads(line)
                if row["kind"] == "learner":
                    self._trained_at[row["learner"]] = time.monotonic()
        spared = self._trained_at.keys() - {fault.learner, *(learner for _, learner in self._frozen)}
        since = time.monotonic() - TRAINS_S
        return fault.kind == "join" or any(self._trained_at[each] > since for each in spared)

    def _carry_out(self, fault: Fault, launcher: Launcher, elapsed: float) -> None:
        runs = fault.learner in launcher.running
        if runs == (fault.kind == "join"):
            self.impossible[fault] = f"learner {fault.learner} {'still ran' if runs else 'had ended before'}"
            return
        self.happened[fault] = self._first_row_s + elapsed
        self._trained_at.pop(fault.learner, None)
        if fault.kind == "join":
            launcher.start(fault.learner)
        elif fault.kind == "kill":
            launcher.send(fault.learner, signal.SIGKILL)
        else:
            assert fault.duration_s is not None
            launcher.send(fault.learner, signal.SIGSTOP)
            self._frozen.append((elapsed + fault.duration_s, fault.learner))

    def report(self) -> list[dict[str, Any]]:
        """Every fault as plain values: `happened_s` is None if it did not happen, and `reason` then says why."""
        reasons = self.impossible | dict.fromkeys(self.left, "the run had ended before")
        every = sorted([*self.happened, *reasons])
        return [
            {
                "option": str(fault),
                **asdict(fault),
                "happened_s": self.happened.get(fault),
                "reason": reasons.get(fault),
            }
            for fault in every
        ]


def check(config: Config, faults: Sequence[Fault], folder: Path) -> None:
    """Raise ConfigError for faults that cannot happen in this order, a join to a super-learner, or a folder with a run."""
    awake_at = dict.fromkeys(range(config.learners), 0.0)  # living learners: when the last freeze ends
    for fault in sorted(faults):
        lives = fault.learner in awake_at
        if fault.kind == "join" and config.group_size != 1:
            raise ConfigError(f"{fault}: a learner cannot join a super-learner; use group_size=1")
        if fault.kind == "join" and lives:
            raise ConfigError(
                f"{fault}: learner {fault.learner} lives at that time; --kill it before, or join another one"
            )
        if fault.kind != "join" and not lives:
            living = ", ".join(map(str, sorted(awake_at)))
            raise ConfigError(
                f"{fault}: learner {fault.learner} does not live at that time; the living learners are {living}"
            )
        if fault.kind == "freeze" and awake_at[fault.learner] > fault.at_s:
            raise ConfigError(f"{fault}: learner {fault.learner} is frozen already at that time")
        if fault.kind == "kill":
            del awake_at[fault.learner]
        else:
            awake_at[fault.learner] = fault.at_s + (fault.duration_s or 0.0)
        if not awake_at:
            raise ConfigError(f"{fault}: this was the last living learner; leave one to finish the run")
    for each in (folder, folder / "undisturbed", folder / "disturbed"):
        if (each / run_directory.CONFIG).exists():
            raise ConfigError(f"'{each}' holds a run already; choose another --out")


def run(config: Config, faults: Sequence[Fault], folder: Path, *, patient: bool = False) -> dict[str, Any]:
    """Train without faults, then with faults, see `FaultInjector`; returns the outcome of both.

    Raises KeyboardInterrupt if a signal has stopped one of the runs, and RoundelayError if the run without faults fails.
    """
    check(config, faults, folder)
    allow_open_files(config.learners)
    undisturbed = run_once(config, (), folder / "undisturbed")
    if not undisturbed["finished"]:
        raise RoundelayError(f"the run without faults failed; its logs are in '{folder / 'undisturbed' / 'logs'}'")
    disturbed = run_once(config, faults, folder / "disturbed", patient=patient)
    return {"faults": disturbed.pop("faults"), "undisturbed": undisturbed, "disturbed": disturbed}


def run_once(config: Config, faults: Sequence[Fault], folder: Path, *, patient: bool = False) -> dict[str, Any]:
    """Train with these faults, and return the outcome. The run writes an audit.

    Raises KeyboardInterrupt if a signal has stopped the run.
    """
    config = replace(config, metrics=replace(config.metrics, every_s=ROW_EVERY_S, audit=True))
    run_directory.begin(folder, config, "roundelay chaos")
    injector = FaultInjector(faults, folder / run_directory.METRICS, patient=patient)
    supervisor = Supervisor(config, folder, meanwhile=injector)
    said, code = supervisor.run().verdict()
    sys.stderr.write(said)
    if code > 128:
        raise KeyboardInterrupt
    harmed = [(at_s, fault.learner) for fault, at_s in injector.happened.items() if fault.kind != "join"]
    return {"exit_code": code, "faults": injector.report()} | outcome(folder, harmed)

"""Learners of a run on this machine: one process each, which lives and dies on its own.

torchrun ends all learners of a group when one fails; here the others go on, as far as their strategy lets them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from roundelay.launch import host_store
from roundelay.training import rundir
from roundelay.training.config import Config
from roundelay.training.coordinator import CoordinatorServer
from roundelay.training.display import Display
from roundelay.training.metrics import JsonLines
from roundelay.training.worker import ADDRESS, SECRET, parties
from roundelay.transport.security import Security

LOOK_EVERY_S = 0.2


class Supervisor:
    """Starts the learners of a run, shows what they do, passes signals on, and says how it ended."""

    def __init__(self, config: Config, folder: Path, place: int | None) -> None:
        self.config, self.folder, self._place = config, folder, place
        self._signals: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed: dict[int, str] = {}

    def run(self) -> int:
        """The exit code: 0 if the run was finished, 128 + signal if one stopped it, 1 if it failed."""
        results = self.folder / rundir.RESULTS
        results.unlink(missing_ok=True)
        secret, listener = secrets.token_bytes(32), socket.create_server(("127.0.0.1", 0))
        sides = parties(self.config, self.config.learners, self.config.learners)
        server = CoordinatorServer(listener, Security(secret), sides)
        store, found = host_store()
        host, port = listener.getsockname()
        environment = found | {ADDRESS: f"{host}:{port}", SECRET: secret.hex()}
        before = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with Display(self.folder / rundir.METRICS, self.config.learners) as display:
                self._start(environment)
                self._watch(display)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._kill()
            server.close()
            del store
        return self._verdict(finished=results.exists())

    def _start(self, environment: dict[str, str]) -> None:
        size = self.config.learners
        threads = max(1, len(os.sched_getaffinity(0)) // size)
        command = [sys.executable, "-m", "roundelay.training.worker", str(self.folder)]
        command += [] if self._place is None else [str(self._place)]
        for rank in range(size):
            own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            own["OMP_NUM_THREADS"] = int(os.environ.get("OMP_NUM_THREADS", threads))
            with (self.folder / "logs" / f"learner-{rank}.log").open("ab") as log:
                self._processes[rank] = subprocess.Popen(
                    command,
                    env=dict(os.environ) | environment | {name: str(value) for name, value in own.items()},
                    stdin=subprocess.PIPE,  # never written to: it closes when we are gone
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C comes to us, and we pass it on once
                )

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if len(self._signals) == 1 else signal.SIGKILL)

    def _watch(self, display: Display) -> None:
        told = False
        running = dict(self._processes)
        while running:
            time.sleep(LOOK_EVERY_S)
            display.update()
            if self._signals and not told:
                told = True
                display.say("stopping: every learner finishes its step and saves (once more to kill them)")
            for rank in [rank for rank, process in running.items() if process.poll() is not None]:
                code = running.pop(rank).returncode
                if code != 0:
                    self._lost(rank, code, display)

    def _lost(self, rank: int, code: int, display: Display) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"{how}: {self._last_words(rank)}" if code > 0 else how
        self._failed[rank] = reason
        display.gone(rank, how)
        display.say(f"learner {rank} is gone, {reason}")
        sink = JsonLines(self.folder / rundir.METRICS)
        event = {"kind": "event", "event": "died", "learner": rank, "reason": reason}
        sink.write(event | {"elapsed_s": display.elapsed_s, "place": display.place})
        sink.close()

    def _last_words(self, rank: int) -> str:
        lines = (self.folder / "logs" / f"learner-{rank}.log").read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()

    def _verdict(self, *, finished: bool) -> int:
        say = sys.stderr.write
        if finished:
            results = json.loads((self.folder / rundir.RESULTS).read_text())
            for split in ("valid", "test"):
                figures = ", ".join(f"{name} {value:.4f}" for name, value in results[split].items())
                say(f"mean model, {split}: {figures}\n")
            say(f"finished in {results['elapsed_s']:.1f} s: {self.folder / rundir.MODEL}\n")
            return 0
        if self._signals and not self._failed:
            say(f"stopped and saved; go on with:\n  {rundir.resume_command()}\n")
            return 128 + self._signals[0]
        first = next(iter(self._failed), None)
        told = f"learner {first} went first ({self._failed[first]})" if first is not None else "no learner finished it"
        say(f"roundelay: error: the run ended early: {told}; logs are in '{self.folder / 'logs'}'\n")
        if any((self.folder / "checkpoints").glob("*/manifest.json")):
            say(f"go on from the last checkpoint with:\n  {rundir.resume_command()}\n")
        return 128 + self._signals[0] if self._signals else 1

"""Learners of a run on this machine: one process each, which lives and dies on its own.

torchrun ends all learners of a group when one fails; here the others go on, as far as their strategy lets them.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from roundelay.cluster.environment import host_store
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import Address, RendezvousState
from roundelay.training import run_directory
from roundelay.training.config import Config
from roundelay.training.display import Display
from roundelay.training.metrics import JsonLines
from roundelay.training.worker import ADDRESS, HOST, LOOPBACK, NUMBER
from roundelay.transport.security import Security

LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Place:
    """Where learners meet and listen.

    Attributes:
        security: what connections must prove to know.
        rendezvous: where it is; without one the supervisor has it itself.
        host: the interface on which everything here listens.
        open_collectives: let sums over learners, which know no secret, go over that interface, too.
    """

    security: Security
    rendezvous: Address | None = None
    host: str = LOOPBACK
    open_collectives: bool = False

    @property
    def collectives_allowed(self) -> bool:
        """On this machine only, or because somebody said so."""
        return self.open_collectives or self.host == LOOPBACK

    @classmethod
    def here(cls) -> Place:
        """This machine, with a secret of its own."""
        return cls(Security(secrets.token_bytes(32)))


class Supervisor:
    """Starts learners on this machine, shows what they do, passes signals on, and says how it ended.

    Args:
        config: of the run.
        folder: of the run.
        resumed: the checkpoint to go on from.
        place: where learners meet.
        numbers: of the learners to start; None is one whose number the rendezvous will choose.
        meanwhile: called a few times a second while learners run, such as to disturb them.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        resumed: int | None = None,
        *,
        place: Place | None = None,
        numbers: Sequence[int | None] | None = None,
        meanwhile: Callable[[Supervisor], None] = lambda supervisor: None,
    ) -> None:
        self.config, self.folder, self._resumed, self._meanwhile = config, folder, resumed, meanwhile
        self._place = place or Place.here()
        self._numbers = list(range(config.learners) if numbers is None else numbers)
        self._running: set[int] = set()
        self._signals: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failed: dict[int, str] = {}
        self._logs: dict[int, Path] = {}
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = ""
        self._server: RendezvousServer | None = None
        self._address = self._place.rendezvous

    def run(self) -> int:
        """The exit code: 0 if the run was finished, 128 + signal if one stopped it, 1 if it failed."""
        results = self.folder / run_directory.RESULTS
        store: object = None
        if self._address is None:
            results.unlink(missing_ok=True)
            store = self._open_rendezvous()
        before = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with Display(self.folder / run_directory.METRICS, self.config.learners) as display:
                for index, number in enumerate(self._numbers):
                    self.start(index if number is None else number, chosen=number is not None)
                self._watch(display)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._kill()
            if self._server is not None:
                self._server.close()
            del store
        return self._verdict(finished=results.exists())

    def _open_rendezvous(self) -> object:
        """Here, in this process; where it is stands in the run's directory, for learners that join later."""
        info: Message = {"folder": str(self.folder.resolve())}
        store: object = None
        if self._place.collectives_allowed and self.config.collective:
            store, info["store"] = host_store(self._place.host)
        desk = RendezvousState(time.monotonic, self._events.put, info)
        self._server = RendezvousServer(open_listener(self._place.host), self._place.security, desk)
        self._address = self._server.address
        run_directory.write_rendezvous(self.folder, self._address, self._place.security)
        return store

    def start(self, number: int, *, chosen: bool = True) -> None:
        """Start a learner, at the beginning or later; if its number is not `chosen`, the rendezvous will choose another."""
        assert self._address is not None
        if number in self._processes:
            self._end(self._processes[number])
        size = len(self._numbers)
        threads = max(1, len(os.sched_getaffinity(0)) // size)
        command = [sys.executable, "-m", "roundelay.training.worker", str(self.folder)]
        command += [] if self._resumed is None else [str(self._resumed)]
        own = {"LOCAL_RANK": str(number % size), "LOCAL_WORLD_SIZE": str(size), HOST: self._place.host}
        own[ADDRESS] = "{}:{}".format(*self._address)
        own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        if chosen:
            own[NUMBER] = str(number)
        self._logs[number] = self.folder / "logs" / (f"learner-{number}.log" if chosen else f"{_stamp()}-{number}.log")
        with self._logs[number].open("ab") as log:
            self._processes[number] = subprocess.Popen(
                command,
                env=dict(os.environ) | self._place.security.environment() | own,
                stdin=subprocess.PIPE,  # never written to: it closes when we are gone
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C comes to us, and we pass it on once
            )
        self._failed.pop(number, None)
        self._running.add(number)

    def send(self, number: int, what: signal.Signals) -> None:
        """Send a signal to learner `number`, if it still runs."""
        if number in self._running and self._processes[number].poll() is None:
            self._processes[number].send_signal(what)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if len(self._signals) == 1 else signal.SIGKILL)

    def _watch(self, display: Display) -> None:
        told = False
        while self._running:
            time.sleep(LOOK_EVERY_S)
            self._meanwhile(self)
            display.update()
            self._tell_events(display)
            if self._signals and not told:
                told = True
                display.say("stopping: every learner finishes its step and saves (once more to kill them)")
            for number in [number for number in self._running if self._processes[number].poll() is not None]:
                self._running.discard(number)
                if code := self._processes[number].returncode:
                    self._lost(number, code, display)
        self._tell_events(display)

    def _lost(self, rank: int, code: int, display: Display) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"{how}: {self._last_words(rank)}" if code > 0 else how
        self._failed[rank] = reason
        display.gone(rank, how)
        if self._server is not None:
            self._server.died(rank, reason)
        else:
            display.say(f"learner {rank} died ({reason})")

    def _tell_events(self, display: Display) -> None:
        """To the terminal, and to the metrics."""
        while not self._events.empty():
            event = self._events.get()
            if event["event"] == "left":  # in order: every run ends so
                continue
            sink = JsonLines(self.folder / run_directory.METRICS)
            sink.write(event | {"elapsed_s": display.elapsed_s, "samples_seen": display.samples_seen})
            sink.close()
            if event["event"] == "stopping":
                self._stopping = event["reason"]
            display.say(_sentence(event))

    def _last_words(self, rank: int) -> str:
        lines = self._logs[rank].read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _kill(self) -> None:
        for process in self._processes.values():
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()

    def _verdict(self, *, finished: bool) -> int:
        say = sys.stderr.write
        if finished and not self._failed.keys() >= self._processes.keys():
            results = json.loads((self.folder / run_directory.RESULTS).read_text())
            for split in ("valid", "test"):
                figures = ", ".join(f"{name} {value:.4f}" for name, value in results[split].items())
                say(f"mean model, {split}: {figures}\n")
            for number, reason in self._failed.items():
                say(f"learner {number} was lost on the way ({reason}); its log: '{self._logs[number]}'\n")
            problems = self.folder / run_directory.PROBLEMS
            if problems.is_file():
                count = len(problems.read_text(encoding="utf-8").splitlines())
                say(f"{count} problems with the data, one line each: '{problems}'\n")
            say(f"finished in {results['elapsed_s']:.1f} s: {self.folder / run_directory.MODEL}\n")
            return 0
        if self._stopping:
            say(f"roundelay: error: {self._stopping}; the run was saved and stopped; go on with:\n")
            say(f"  {run_directory.resume_command(self.folder)}\n")
            return 1
        if self._signals and not self._failed:
            say(f"stopped and saved; go on with:\n  {run_directory.resume_command(self.folder)}\n")
            return 128 + self._signals[0]
        first = next(iter(self._failed), None)
        told = f"learner {first} went first ({self._failed[first]})" if first is not None else "no learner finished it"
        say(f"roundelay: error: the run ended early: {told}; logs are in '{self.folder / 'logs'}'\n")
        if any((self.folder / "checkpoints").glob("*/manifest.json")):
            say(f"go on from the last checkpoint with:\n  {run_directory.resume_command(self.folder)}\n")
        return 128 + self._signals[0] if self._signals else 1


def _stamp() -> str:
    """For the logs of learners that do not know their number yet."""
    return f"{platform.node()}-{os.getpid()}"


def _sentence(event: Message) -> str:
    who = "" if event["learner"] is None else f"learner {event['learner']} "
    more = f" ({event['reason']})" if event["reason"] else ""
    if event["event"] == "healed":
        return f"healed after {event['seconds']:.1f} s: {event['living']} learners go on"
    if event["event"] == "stopping":
        return f"stopping: {event['reason']}"
    return f"{who}{event['event']}{more}; {event['living']} live"

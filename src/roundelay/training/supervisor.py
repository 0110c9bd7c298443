"""The supervisor of a run starts one process per learner on this machine and watches them.

torchrun ends all processes of a group when one of them fails. Here the other learners go on, as far as their strategy allows.
"""

from __future__ import annotations

import contextlib
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

from roundelay.cluster.environment import LOOPBACK, host_store
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.training import recipes, run_directory
from roundelay.training.build import strategy_of
from roundelay.training.config import Config
from roundelay.training.display import Display
from roundelay.training.metrics import JsonLines
from roundelay.training.worker import WorkerSpec
from roundelay.transport.security import Security

LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class ConnectionSettings:
    """How the learners of a run find and trust each other.

    Attributes:
        security: the secret of the run, and its certificate if it uses TLS.
        rendezvous: address of the rendezvous; None lets the supervisor run it.
        host: the interface that everything on this machine listens on.
        open_collectives: allow collectives, which have no authentication, on an interface other than the loopback.
    """

    security: Security
    rendezvous: Address | None = None
    host: str = LOOPBACK
    open_collectives: bool = False

    @property
    def collectives_allowed(self) -> bool:
        """Whether Gloo and NCCL may be used."""
        return self.open_collectives or self.host == LOOPBACK

    @classmethod
    def on_this_machine(cls) -> ConnectionSettings:
        """Settings for a run on the loopback interface only, with a new secret."""
        return cls(Security(secrets.token_bytes(32)))


class Worker:
    """A worker process on this machine.

    Args:
        spec: sent to the process.
        log: the file that the process writes its output to.
        threads: how many threads torch may use, unless OMP_NUM_THREADS is set.

    Threads of torch that wait for each other sleep. If they kept a core busy instead, which is the default, a learner with two
    threads would be up to 100 times slower on a machine whose cores other programs use.
    """

    def __init__(self, spec: WorkerSpec, log: Path, threads: int) -> None:
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if name not in spec.security}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roundelay.training.worker"],
                env={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | inherited,
                stdin=subprocess.PIPE,  # stays open: it closes when this process ends, and the worker then stops
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which passes it on once
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already; see `exit_code`
            self._process.stdin.write(spec.to_line())
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; negative if a signal ended it."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process if it still runs, and release its resources."""
        self.send(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def last_line(self) -> str:
        """The last line of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


class Supervisor:
    """Starts learners on this machine, shows their progress, passes signals on, and prints how the run ended.

    Args:
        config: of the run.
        folder: of the run.
        resume_at: samples seen at the checkpoint to resume from; None begins a new run.
        settings: how learners find each other; by default everything stays on this machine.
        learners: ids of the learners to start here; None stands for a learner whose id the rendezvous chooses.
        meanwhile: called a few times a second while learners run, for example to disturb them.
        resume_command: the command that continues this run; printed if the run ends early.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        resume_at: int | None = None,
        *,
        settings: ConnectionSettings | None = None,
        learners: Sequence[int | None] | None = None,
        meanwhile: Callable[[Supervisor], None] = lambda supervisor: None,
        resume_command: str | None = None,
    ) -> None:
        self.config, self.folder, self._resume_at, self._meanwhile = config, folder, resume_at, meanwhile
        self._settings = settings or ConnectionSettings.on_this_machine()
        self._learners = list(range(config.learners) if learners is None else learners)
        self._resume_command = resume_command or run_directory.resume_command(folder)
        self._workers: dict[int, Worker] = {}
        self._running: set[int] = set()
        self._failed: dict[int, str] = {}
        self._signals: list[int] = []
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop_reason = ""
        self._server: RendezvousServer | None = None
        self._rendezvous = self._settings.rendezvous

    def run(self) -> int:
        """Run until all learners have ended. Returns the exit code.

        It is 0 if the run was finished, 128 + the number of the signal if a signal stopped the run, and else 1.
        """
        results = self.folder / run_directory.RESULTS
        store: object = None
        if self._rendezvous is None:
            results.unlink(missing_ok=True)
            store = self._open_rendezvous()
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with Display(self.folder / run_directory.METRICS, self.config.learners) as display:
                for index, learner in enumerate(self._learners):
                    self.start(index if learner is None else learner, chosen=learner is not None)
                self._watch(display)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for worker in self._workers.values():
                worker.end()
            if self._server is not None:
                self._server.close()
            del store
        return self._verdict(finished=results.exists())

    def _open_rendezvous(self) -> object:
        """Run the rendezvous in this process, and write its address to the run's directory for learners that join later.

        Returns the store of the process groups, which must be kept while learners run.
        """
        info: Message = {"folder": str(self.folder.resolve())}
        store: object = None
        if self._settings.collectives_allowed and strategy_of(self.config).uses_collectives:
            store, info["store"] = host_store(self._settings.host)
        state = RendezvousState(time.monotonic, self._events.put, info)
        self._server = RendezvousServer(open_listener(self._settings.host), self._settings.security, state)
        self._rendezvous = self._server.address
        run_directory.write_rendezvous(self.folder, self._rendezvous, self._settings.security)
        return store

    def start(self, learner: int, *, chosen: bool = True) -> None:
        """Start a learner, at the beginning of the run or later.

        Without `chosen`, the number `learner` only identifies the process here, and the rendezvous chooses the id.
        """
        assert self._rendezvous is not None
        if learner in self._workers:
            self._workers[learner].end()
        local_size = len(self._learners)
        spec = WorkerSpec(
            config=recipes.as_table(self.config),
            folder=str(self.folder),
            resume_at=self._resume_at,
            rendezvous=self._rendezvous,
            security=self._settings.security.environment(),
            host=self._settings.host,
            learner=learner if chosen else None,
            local_rank=learner % local_size,
            local_size=local_size,
        )
        # If the id is not known yet, host name and process id make the name of the log unique among all machines.
        name = f"learner-{learner}" if chosen else f"{platform.node()}-{os.getpid()}-{learner}"
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
        self._workers[learner] = Worker(spec, self.folder / "logs" / f"{name}.log", threads)
        self._failed.pop(learner, None)
        self._running.add(learner)

    @property
    def running(self) -> frozenset[int]:
        """Learners whose process runs, also if it is frozen."""
        return frozenset(self._running)

    def send(self, learner: int, number: signal.Signals) -> None:
        """Send a signal to a learner if it still runs."""
        if learner in self._running:
            self._workers[learner].send(number)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        for worker in self._workers.values():
            worker.send(signal.SIGTERM if len(self._signals) == 1 else signal.SIGKILL)

    def _watch(self, display: Display) -> None:
        announced = False
        while self._running:
            time.sleep(LOOK_EVERY_S)
            self._meanwhile(self)
            display.update()
            self._show_events(display)
            if self._signals and not announced:
                announced = True
                display.say("stopping: every learner finishes its step and saves; press Ctrl-C again to kill them")
            for learner in [learner for learner in self._running if self._workers[learner].exit_code is not None]:
                self._running.discard(learner)
                if code := self._workers[learner].exit_code:
                    self._lost(learner, code, display)
        self._show_events(display)

    def _lost(self, learner: int, code: int, display: Display) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"{how}: {self._workers[learner].last_line()}" if code > 0 else how
        self._failed[learner] = reason
        display.gone(learner, how)
        if self._server is not None:
            self._server.died(learner, reason)
        else:
            display.say(f"learner {learner} died ({reason})")

    def _show_events(self, display: Display) -> None:
        """Write the events of the rendezvous to the metrics, and show them."""
        while not self._events.empty():
            event = self._events.get()
            if event["event"] == "left":  # every learner leaves at the end of a run
                continue
            sink = JsonLines(self.folder / run_directory.METRICS)
            sink.write(event | {"elapsed_s": display.elapsed_s, "samples_seen": display.samples_seen})
            sink.close()
            if event["event"] == "stopping":
                self._stop_reason = event["reason"]
            display.say(_sentence(event))

    def _verdict(self, *, finished: bool) -> int:
        """Print how the run ended, and what to do next; return the exit code."""
        say, again = sys.stderr.write, f"  {self._resume_command}\n"
        if finished and not self._failed.keys() >= self._workers.keys():
            say(self._summary())
            return 0
        if self._stop_reason:
            say(f"roundelay: error: {self._stop_reason}; the run was saved and stopped; go on with:\n{again}")
            return 1
        if self._signals and not self._failed:
            say(f"stopped and saved; go on with:\n{again}")
            return 128 + self._signals[0]
        first = next(iter(self._failed), None)
        why = "no learner finished it" if first is None else f"learner {first} was lost first ({self._failed[first]})"
        say(f"roundelay: error: the run ended early: {why}; logs are in '{self.folder / 'logs'}'\n")
        if any((self.folder / "checkpoints").glob("*/manifest.json")):
            say(f"go on from the last checkpoint with:\n{again}")
        return 128 + self._signals[0] if self._signals else 1

    def _summary(self) -> str:
        results = json.loads((self.folder / run_directory.RESULTS).read_text())
        lines = []
        for split in ("valid", "test"):
            figures = ", ".join(f"{name} {value:.4f}" for name, value in results[split].items())
            lines.append(f"mean model, {split}: {figures}")
        for learner, reason in self._failed.items():
            lines.append(f"learner {learner} was lost on the way ({reason}); its log: '{self._workers[learner].log}'")
        problems = self.folder / run_directory.PROBLEMS
        if problems.is_file():
            count = len(problems.read_text(encoding="utf-8").splitlines())
            lines.append(f"{count} problems with the data, one line each: '{problems}'")
        lines.append(f"finished in {results['elapsed_s']:.1f} s: {self.folder / run_directory.MODEL}")
        return "\n".join(lines) + "\n"


def _sentence(event: Message) -> str:
    """The event as a line for the terminal."""
    learner = "" if event["learner"] is None else f"learner {event['learner']} "
    reason = f" ({event['reason']})" if event["reason"] else ""
    if event["event"] == "recovered":
        return f"recovered after {event['seconds']:.1f} s: {event['living']} learners go on"
    if event["event"] == "stopping":
        return f"stopping: {event['reason']}"
    return f"{learner}{event['event']}{reason}; {event['living']} live"

"""The supervisor of a run starts one process per learner on this machine and watches them.

torchrun ends all processes of a group when one of them fails. Here the other learners go on, as far as their strategy allows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from roundelay.cluster.environment import LOOPBACK, host_store
from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.formation import SAY_EVERY_S, sentence as who_has_come
from roundelay.cluster.rendezvous.messages import Message
from roundelay.cluster.rendezvous.server import RendezvousServer, open_listener
from roundelay.cluster.rendezvous.session import RendezvousSession
from roundelay.cluster.rendezvous.state import RendezvousState
from roundelay.errors import RendezvousLostError
from roundelay.training import recipes, run_directory, run_lock
from roundelay.training.build import strategy_of
from roundelay.training.config import Config
from roundelay.training.display import Display
from roundelay.training.metrics import JsonLines
from roundelay.training.verdict import Ending, sentence
from roundelay.training.worker import WorkerSpec
from roundelay.training.worker_process import Worker
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
        joins: the identity of the run under way that the learners join; empty if they begin a run.
    """

    security: Security
    rendezvous: Address | None = None
    host: str = LOOPBACK
    open_collectives: bool = False
    joins: str = ""

    @property
    def collectives_allowed(self) -> bool:
        """Whether Gloo and NCCL may be used."""
        return self.open_collectives or self.host == LOOPBACK

    @classmethod
    def on_this_machine(cls) -> ConnectionSettings:
        """Settings for a run on the loopback interface only, with a new secret."""
        return cls(Security(secrets.token_bytes(32)))


def identity_of(config: Config, folder: Path, resume_at: int | None) -> str:
    """What tells a run apart from others: its directory, its configuration, and where it resumes.

    All machines of a run have the same identity if they name the same directory.
    """
    digest = hashlib.sha256(json.dumps([recipes.as_table(config), resume_at], sort_keys=True).encode()).hexdigest()
    return f"{folder.resolve()} {digest[:8]}"


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
        self._lost_before_stop: frozenset[int] = frozenset()
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop_reason = ""
        self._server: RendezvousServer | None = None
        self._session: RendezvousSession | None = None
        self._rendezvous = self._settings.rendezvous
        self._identity = self._settings.joins or identity_of(config, folder, resume_at)
        self._next_look_s = time.monotonic() + SAY_EVERY_S

    def run(self) -> int:
        """Run until all learners have ended. Returns the exit code.

        It is 0 if the run was finished, 128 + the number of the signal if a signal stopped the run, and else 1.
        """
        results = self.folder / run_directory.RESULTS
        store: object = None
        if self._rendezvous is None:
            results.unlink(missing_ok=True)
            store = self._open_rendezvous()
        else:
            self._session = RendezvousSession(self._rendezvous, self._settings.security)
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
            if self._session is not None:
                self._session.close()
            del store
        first = self._signals[0] if self._signals else None
        joined, count = self._settings.joins != "", len(self._workers)
        ending = Ending(
            self.folder,
            self._resume_command,
            first,
            self._stop_reason,
            self._failed,
            count,
            joined,
            self._lost_before_stop,
        )
        said, code = ending.verdict()
        sys.stderr.write(said)
        return code

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
        # If the id is not known yet, host name and process id make the name of the log unique among all machines.
        name = f"learner-{learner}" if chosen else self._process_name(learner)
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
            run=self._identity,
            joins=self._settings.joins != "",
            process=self._process_name(learner),
        )
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
        log = self.folder / "logs" / f"{name}.log"
        self._workers[learner] = Worker(spec, log, threads, keep_open=run_lock.held())
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

    @staticmethod
    def _process_name(learner: int) -> str:
        return f"{platform.node()}-{os.getpid()}-{learner}"

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if not self._signals:
            self._lost_before_stop = frozenset(self._failed)
        self._signals.append(number)
        if self._server is not None:
            self._server.stop(f"the supervisor got {signal.Signals(number).name}")  # learners of other supervisors, too
        for worker in self._workers.values():
            worker.send(signal.SIGTERM if len(self._signals) == 1 else signal.SIGKILL)

    def _watch(self, display: Display) -> None:
        announced = False
        while self._running:
            time.sleep(LOOK_EVERY_S)
            self._meanwhile(self)
            display.update()
            self._show_events(display)
            self._say_who_is_missing(display)
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
        elif self._session is not None:
            self._session.report_death(self._process_name(learner), reason, self._identity)
            display.say(f"learner {learner} died ({reason})")

    def _say_who_is_missing(self, display: Display) -> None:
        """Every few seconds until the run begins: which learners have come, and where the others should connect."""
        if display.samples_seen or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + SAY_EVERY_S
        missing = ""
        with contextlib.suppress(RendezvousLostError):
            if self._server is not None and not self._server.formed():
                missing = self._server.waiting() or who_has_come(self.config.learners, ())
            elif self._session is not None:
                missing = self._session.ask_for_info().get("waiting", "")
        if missing and self._rendezvous is not None:
            display.say("waiting at {}:{}: {}".format(*self._rendezvous, missing))

    def _show_events(self, display: Display) -> None:
        """Write the events of the rendezvous to the metrics, and show them."""
        while not self._events.empty():
            event = self._events.get()
            if event["event"] in ("left", "waiting"):  # every learner leaves at the end; see `_say_who_is_missing`
                continue
            sink = JsonLines(self.folder / run_directory.METRICS)
            sink.write(event | {"elapsed_s": display.elapsed_s, "samples_seen": display.samples_seen})
            sink.close()
            if event["event"] == "stopping":
                self._stop_reason = event["reason"]
            display.say(sentence(event))

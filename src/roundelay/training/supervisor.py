"""The supervisor of `roundelay train`: it has the launcher start the learners of this machine, and says how the run ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from roundelay.cluster.connection_settings import ConnectionSettings
from roundelay.cluster.elastic_world import HOST, Rendezvous
from roundelay.cluster.environment import LOOPBACK, address_towards
from roundelay.cluster.launcher import Launcher
from roundelay.cluster.learner_process import Program
from roundelay.cluster.membership import Address
from roundelay.cluster.run_rendezvous import RemoteRendezvous
from roundelay.cluster.ticket import Ticket
from roundelay.training import recipes, run_directory, run_lock
from roundelay.training.config import Config
from roundelay.training.directory_server import DirectoryServer
from roundelay.training.display import Display
from roundelay.training.resuming import Resume
from roundelay.training.run_reporter import RunReporter
from roundelay.training.verdict import Ending


def identity_of(config: Config, folder: Path, resume: Resume) -> str:
    """What tells a run apart from others: the name of its directory, its configuration, and whether and where it resumes.

    Every machine of a run has its own directory; their names are the same.
    """
    described = json.dumps([recipes.as_table(config), asdict(resume)], sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()
    return f"{folder.resolve().name} {digest[:8]}"


class Supervisor:
    """Trains with the learners of this machine, and shows their progress.

    Args:
        config: of the run, as it is in the run's directory.
        folder: of the run.
        resume: the checkpoint to resume from; None begins a new run.
        settings: how learners find each other; by default everything stays on this machine.
        learners: ids of the learners to start here; None stands for a learner whose id the rendezvous chooses.
        joins: the identity of the run under way that the learners join; empty if they begin a run.
        meanwhile: called a few times a second while learners run, for example to disturb them.
        resume_command: the command that continues this run; printed if the run ends early.
        metrics: the name of the file of metrics of this machine in `folder`.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        resume: Resume | None = None,
        *,
        settings: ConnectionSettings | None = None,
        learners: Sequence[int | None] | None = None,
        joins: str = "",
        meanwhile: Callable[[Launcher], None] = lambda launcher: None,
        resume_command: str | None = None,
        metrics: str = run_directory.METRICS,
    ) -> None:
        self.config, self.folder, self._meanwhile = config, folder, meanwhile
        self._resume = resume or Resume()
        self._metrics = folder / metrics
        self._settings = settings or ConnectionSettings.on_this_machine()
        self._learners = list(range(config.learners) if learners is None else learners)
        self._joins = joins
        self._resume_command = resume_command or run_directory.resume_command(folder)

    def run(self) -> Ending:
        """Run until all learners have ended; says how it ended."""
        with Display(self._metrics, self.config.learners) as display:
            reporter = RunReporter(display, self._metrics, self._meanwhile)
            with (
                contextlib.closing(self._rendezvous(reporter)) as rendezvous,
                contextlib.closing(self._directory_server(rendezvous.ticket)) as server,
            ):
                program = self._program(server.address)
                launcher = Launcher(program, rendezvous, self._learners, reporter=reporter)
                launcher.run()
            reporter.finish(all_failed=len(launcher.failed) == launcher.started)
        return Ending(
            self.folder,
            self._resume_command,
            launcher.signals[0] if launcher.signals else None,
            reporter.stop_reason,
            launcher.failed,
            launcher.started,
            self._joins != "",
            launcher.lost_before_stop,
            several_machines=self._settings.rendezvous is not None,
            killed=len(launcher.signals) > 1,
        )

    def _rendezvous(self, reporter: RunReporter) -> Rendezvous | RemoteRendezvous:
        """Connect to the rendezvous of the run, or run it in this process, with a ticket for learners that join later."""
        settings, config = self._settings, self.config
        if not self._joins:
            run_directory.set_results_aside(self.folder)
        if settings.rendezvous is not None:
            identity = self._joins or identity_of(config, self.folder, self._resume)
            security = settings.security.environment()
            reporter.has_events = False
            return RemoteRendezvous(
                Ticket(settings.rendezvous, security, config.learners, config.min_learners, identity)
            )
        rendezvous = Rendezvous(
            config.learners,
            settings.server_host,
            min_learners=config.min_learners,
            security=settings.security,
            open_collectives=settings.open_collectives,
            on_event=reporter.events.put,
        )
        (self.folder / run_directory.TICKET).unlink(missing_ok=True)
        rendezvous.ticket.write(self.folder / run_directory.TICKET)
        return rendezvous

    def _directory_server(self, ticket: Ticket) -> DirectoryServer:
        """Serve the directory to learners of other machines."""
        rendezvous = ticket.address[0]
        towards = LOOPBACK if rendezvous == LOOPBACK else address_towards(rendezvous)
        return DirectoryServer(self.folder, self._settings.host or towards, self._settings.security)

    def _program(self, files: Address) -> Program:
        command = [sys.executable, "-m", "roundelay.training.worker", str(self.folder), self._metrics.name]
        command += ["--files", "{}:{}".format(*files), *self._resume.options()]
        command += ["--guest"] if self._joins else []
        host = {} if self._settings.host is None else {HOST: self._settings.host}
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # Without the supervisor the learners save and end.
        return Program(command, host, logs, keep_open=run_lock.held(), when_orphaned=signal.SIGTERM)

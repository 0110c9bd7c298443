"""Checkpoints and metrics of a run whose machines have directories of their own.

Every machine keeps the files of its own learners. The first living learner collects the checkpoints of the others, so its
machine has complete ones; the other machines remove what it no longer needs.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.errors import CheckpointError
from roundelay.training import checkpoint, run_directory
from roundelay.training.checkpoint import Checkpoints, Piece
from roundelay.training.directory_server import Listing, RemoteDirectory, directory_id
from roundelay.transport.security import Security

log = logging.getLogger("roundelay")

RETRY_S = 1.0
COPIED = "metrics-from-"  # how the names of metrics of other machines begin


class OtherMachines:
    """The directories of the other machines, as one learner sees them.

    Args:
        folder: the run's directory on this machine.
        client: a connection to the rendezvous, where this learner has registered.
        own: where the supervisor of this machine serves `folder`.
        security: the secret of the run.
    """

    def __init__(self, folder: Path, client: RendezvousClient, own: Address, security: Security) -> None:
        self.folder, self._client, self._own, self._security = folder, client, own, security

    @property
    def living(self) -> tuple[int, ...]:
        """The living learners."""
        assert self._client.view is not None
        return self._client.view.membership.living

    @property
    def leads(self) -> bool:
        """Whether this learner is the first living one."""
        return self._client.id == self.living[0]

    def addresses(self) -> set[Address]:
        """Where the supervisors of other machines serve their directories; also those that were lost."""
        return set(self._client.served_files().values()) - {self._own}

    def fetch(self, wanted: dict[int, set[int]]) -> None:
        """Copy the files of these learners, by samples seen, from the other machines, as far as they are there."""
        for address in self.addresses():
            try:
                with RemoteDirectory(address, self._security) as other:
                    self._fetch_from(other, wanted)
            except OSError as error:
                log.info("cannot copy checkpoints from %s:%d: %s", *address, error)

    def _fetch_from(self, other: RemoteDirectory, wanted: dict[int, set[int]]) -> None:
        listing = other.listing()
        if listing.directory == directory_id(self.folder):
            return  # both machines see one directory
        for samples_seen, learners in wanted.items():
            there = listing.pieces.get(samples_seen, {})
            for learner in learners & there.keys():
                copy_piece(other, self.folder, samples_seen, there[learner])

    def first_listing(self) -> Listing | None:
        """What the machine of the first living learner has; None if it is this machine, or sees the same directory."""
        address = self._client.served_files().get(self.living[0], self._own)
        if address == self._own:
            return None
        with RemoteDirectory(address, self._security) as other:
            listing = other.listing()
        return None if listing.directory == directory_id(self.folder) else listing

    def copy_metrics(self) -> None:
        """Copy the metrics of the other machines to this one. A machine that cannot be reached is left out."""
        for address in self.addresses():
            try:
                with RemoteDirectory(address, self._security) as other:
                    listing = other.listing()
                    if listing.directory == directory_id(self.folder):
                        continue
                    for name in listing.metrics:
                        if not name.startswith(COPIED):
                            copy = COPIED + listing.machine + name.removeprefix("metrics")
                            checkpoint.write_whole(self.folder / copy, other.read(name))
            except OSError as error:
                log.warning("the metrics of the machine at %s:%d are missing here: %s", *address, error)


@dataclass(frozen=True)
class RunFiles:
    """Where a learner finds and leaves the files of a run.

    Attributes:
        folder: the run's directory on this machine.
        metrics: the name of the file of metrics there, which the learners of this machine share.
        others: the directories of other machines; None if all machines see `folder`.
    """

    folder: Path
    metrics: str = run_directory.METRICS
    others: OtherMachines | None = None


def copy_piece(other: RemoteDirectory, folder: Path, samples_seen: int, piece: Piece) -> None:
    """Copy the file of one learner to the run's directory on this machine."""
    data = other.read(f"checkpoints/{checkpoint.folder_name(samples_seen)}/{piece['file']}")
    if hashlib.sha256(data).hexdigest() != piece["sha256"]:
        raise CheckpointError(f"the file of learner {piece['learner']} at {samples_seen} is torn or altered")
    checkpoint.write_piece(folder / "checkpoints", samples_seen, piece, data)


class CheckpointCollector:
    """After every save: the first living learner collects the files of the others; other learners remove old files.

    This is done in a background thread.
    """

    def __init__(self, checkpoints: Checkpoints, others: OtherMachines) -> None:
        self._checkpoints, self._others = checkpoints, others
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="roundelay-collect")
        self._working: Future[None] | None = None
        self._closing = threading.Event()
        self._expected: dict[int, set[int]] = {}  # by samples seen: learners that lived when this learner saved

    def saved(self, samples_seen: int, learners: Iterable[int]) -> None:
        """This learner has begun to save, and expects the files of `learners`."""
        self._expected[samples_seen] = set(learners)
        if self._working is None or self._working.done():
            self._working = self._worker.submit(self._work)

    def collect(self, samples_seen: int, learners: Iterable[int]) -> list[int]:
        """Wait until the files of `learners` are here, or the learners are lost. Returns the learners with a file."""
        expected = set(learners)
        while True:
            found = checkpoint.pieces_at(self._checkpoints.folder, samples_seen).keys() & expected
            missing = expected - found
            if not missing & set(self._others.living):
                return sorted(found)
            self._others.fetch({samples_seen: missing})
            if not missing <= checkpoint.pieces_at(self._checkpoints.folder, samples_seen).keys():
                self._closing.wait(RETRY_S)

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        self._closing.set()
        self._worker.shutdown()

    def _work(self) -> None:
        try:
            if not self._others.addresses():
                return
            while self._others.leads and self._look():
                if self._closing.wait(RETRY_S):
                    return
            if not self._others.leads and (listing := self._others.first_listing()) is not None:
                self._checkpoints.remove_before(listing.complete)
        except OSError as error:  # it is tried again after the next save
            log.info("cannot collect checkpoints: %s", error)

    def _look(self) -> bool:
        """Copy what other machines have saved. Returns whether the newest checkpoint still lacks files."""
        folder = self._checkpoints.folder
        newest = max((each.samples_seen for each in checkpoint.complete(folder)), default=-1)
        self._expected = {number: each for number, each in list(self._expected.items()) if number > newest}
        missing = {n: each - checkpoint.pieces_at(folder, n).keys() for n, each in self._expected.items()}
        self._others.fetch(missing)
        living = set(self._others.living)
        for number in sorted(missing, reverse=True):
            if self._checkpoints.complete(number, self._expected[number] & living):
                break
        return any(number > newest for number in self._expected)

"""The machines of a run, each with a directory of its own, agree on the checkpoint to resume from, and share its files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundelay.cluster.membership import Address
from roundelay.cluster.rendezvous.client import RendezvousClient
from roundelay.errors import CheckpointError
from roundelay.training import checkpoint
from roundelay.training.checkpoint import Checkpoint, Pieces
from roundelay.training.directory_server import Listing, RemoteDirectory
from roundelay.training.other_machines import copy_piece
from roundelay.transport.security import Security

log = logging.getLogger("roundelay")

_RESUMING = "resuming"  # what a learner waits for at a barrier


@dataclass(frozen=True)
class Resume:
    """Which checkpoint a run resumes from, if any.

    Attributes:
        samples_seen: at the checkpoint.
        together: its files may be on several machines, which agree on it. Then None stands for the newest one.
    """

    samples_seen: int | None = None
    together: bool = False

    def options(self) -> list[str]:
        """As options of a learner process."""
        wanted = [] if self.samples_seen is None else ["--resume-at", str(self.samples_seen)]
        return wanted + ["--resume-together"] * self.together

    def checkpoint(
        self, client: RendezvousClient, folder: Path, files: Address, security: Security
    ) -> Checkpoint | None:
        """The checkpoint, with all its files in `folder`; None begins a new run. See `agreed_checkpoint`."""
        if self.together:
            return agreed_checkpoint(client, folder, self.samples_seen, files, security)
        return None if self.samples_seen is None else checkpoint.at(folder / "checkpoints", self.samples_seen)


def agreed_checkpoint(
    client: RendezvousClient, folder: Path, wanted: int | None, own: Address, security: Security
) -> Checkpoint:
    """The checkpoint that all learners resume from: the newest complete one, or the one at `wanted` samples.

    Its files may be on several machines. Afterwards all of them are also in `folder`, and later checkpoints are set aside.
    All learners that begin together call this.

    Raises CheckpointError, on all learners, if there is no such checkpoint, or if a machine cannot get its files.
    """
    problem = ""
    while True:
        offers = _at_barrier(client, {"files": own, "listing": asdict(Listing.of(folder)), "problem": problem})
        if problems := [offer["problem"] for offer in offers.values() if offer["problem"]]:
            raise CheckpointError(problems[0])
        listings = {learner: Listing.from_table(offer["listing"]) for learner, offer in offers.items()}
        samples_seen = chosen(list(listings.values()), wanted)
        if all(_is_prepared(listing, samples_seen) for listing in listings.values()):
            return checkpoint.at(folder / "checkpoints", samples_seen)
        machines = {learner: (str(offer["files"][0]), int(offer["files"][1])) for learner, offer in offers.items()}
        if client.id == min(learner for learner, address in machines.items() if address == own):
            problem = _prepare(folder, samples_seen, machines, listings, security)


def _at_barrier(client: RendezvousClient, offer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The offers of all learners that resume. A learner that joins may wait for something else; it meets them later."""
    assert client.view is not None
    view = client.barrier(client.view.membership.generation, {_RESUMING: offer})
    return {learner: value[_RESUMING] for learner, value in view.values.items() if _RESUMING in value}


def chosen(listings: Collection[Listing], wanted: int | None) -> int:
    """The samples seen at the checkpoint to resume from, if these are the directories of all machines.

    Raises CheckpointError if there is none. The message says what else can be used.
    """
    together = union(listings)
    complete = {number for listing in listings for number in listing.complete} | {
        number for number, pieces in together.items() if checkpoint.is_complete(pieces)
    }
    if wanted is None and complete:
        return max(complete)
    if wanted is not None and wanted in together:
        return wanted
    found = [f"{number} (of {len(pieces)} learners)" for number, pieces in sorted(together.items())]
    there = f"the machines have files of {', '.join(found)}" if found else "no machine has a checkpoint"
    if wanted is None:
        raise CheckpointError(
            f"there is no checkpoint with the files of all learners; {there}"
            + (f"; go on from the learners that saved by --resume {max(together)}" if found else "")
        )
    raise CheckpointError(f"there is no checkpoint at {wanted}; {there}")


def union(listings: Collection[Listing]) -> Pieces:
    """The pieces that these machines have together."""
    together: Pieces = {}
    for listing in listings:
        for number, pieces in listing.pieces.items():
            together.setdefault(number, {}).update(pieces)
    return together


def _is_prepared(listing: Listing, samples_seen: int) -> bool:
    return samples_seen in listing.complete and max(listing.pieces) == samples_seen


def _prepare(
    folder: Path,
    samples_seen: int,
    machines: Mapping[int, Address],
    listings: Mapping[int, Listing],
    security: Security,
) -> str:
    """Copy missing files to this machine, and set later checkpoints aside. Returns what went wrong; empty if nothing did."""
    checkpoints = folder / "checkpoints"
    try:
        for learner, listing in listings.items():
            have = checkpoint.pieces_at(checkpoints, samples_seen)
            there = listing.pieces.get(samples_seen, {})
            missing = [piece for number, piece in there.items() if number not in have]
            if missing:
                with RemoteDirectory(machines[learner], security) as other:
                    for piece in missing:
                        copy_piece(other, folder, samples_seen, piece)
        checkpoint.write_manifest(checkpoints, samples_seen, ())
        checkpoint.at(checkpoints, samples_seen).verify()
        checkpoint.abandon_after(checkpoints, samples_seen)
    except OSError as error:
        return f"cannot prepare the checkpoint at {samples_seen} in '{folder}': {error}"
    return ""

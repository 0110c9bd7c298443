"""Beside a checkpoint FILE of Lightning, the folder FILE.learners has the state of each learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import CheckpointIO

from roundelay.sampler import ElasticSampler


class LearnerFiles:
    """The states of learners beside the checkpoints of one Trainer.

    Learners may have different names for one checkpoint, because a name can hold a figure, such as the steps of a learner. The
    name of the learner that writes the checkpoint counts; see `agree`.

    Args:
        io: reads and writes files.
        rank: of this learner.
    """

    def __init__(self, io: CheckpointIO, rank: int) -> None:
        self._io, self._rank = io, rank
        self._agreed: dict[str, str] = {}

    def agree(self, own: str | Path, agreed: str) -> None:
        """Remember that the checkpoint which this learner calls `own` is in the file `agreed`."""
        self._agreed[str(own)] = agreed

    def checkpoint(self, name: str | Path) -> str:
        """The file of a checkpoint that this learner may have another name for."""
        return self._agreed.get(str(name), str(name))

    def save(self, checkpoint: str, state: dict[str, Any], storage_options: Any = None) -> None:  # noqa: ANN401
        """Save the state of this learner beside the checkpoint."""
        self._io.save_checkpoint(state, self._own(checkpoint), storage_options)

    def load(self, checkpoint: str) -> dict[str, Any]:
        """The state of this learner; empty if there is none."""
        own = self._own(checkpoint)
        return self._io.load_checkpoint(own, weights_only=True) if Path(own).is_file() else {}

    def load_sampler(self, checkpoint: str, sampler: ElasticSampler) -> None:
        """Continue after the batches that any learner had used, also with another number of learners."""
        files = sorted(Path(self.folder(checkpoint)).glob("*.ckpt"))
        states = [self._io.load_checkpoint(str(file), weights_only=True).get("sampler") for file in files]
        sampler.load_state_dict(*(state for state in states if state is not None))

    def remove(self, checkpoint: str) -> None:
        """Remove the states of all learners."""
        self._io.remove_checkpoint(self.folder(checkpoint))

    @staticmethod
    def folder(checkpoint: str) -> str:
        """The folder beside a checkpoint."""
        return f"{checkpoint}.learners"

    def _own(self, checkpoint: str) -> str:
        return f"{self.folder(checkpoint)}/{self._rank}.ckpt"

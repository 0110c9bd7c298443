"""The processes of an elastic run, such as those of `roundelay launch`, as Lightning sees them."""

from __future__ import annotations

import os
from datetime import timedelta

from lightning.pytorch.plugins.environments import ClusterEnvironment

from roundelay.cluster.elastic_world import JOINS
from roundelay.cluster.environment import form_process_group, init
from roundelay.cluster.ticket import TICKET
from roundelay.errors import LaunchError


class ElasticEnvironment(ClusterEnvironment):
    """One process per learner. The learners find each other at the rendezvous that ROUNDELAY_TICKET names.

    Lightning's ranks are the ids of the learners. Its process group has the learners that began together, for good.

    Raises LaunchError if the run is under way, because no learner can join Lightning's process group later.
    """

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get(JOINS) == "1":
            raise LaunchError(_TOO_LATE)
        self._world = init()
        if self._world.client is not None and self._world.client.joining:
            self._world.close(_TOO_LATE)
            raise LaunchError(_TOO_LATE)

    @staticmethod
    def detect() -> bool:
        """Whether this process has a ticket, and torchrun or another launcher has not numbered it."""
        return TICKET in os.environ and "RANK" not in os.environ

    def form_process_group(self, backend: str, timeout: timedelta | None) -> None:
        """Form torch's default process group. Later calls do nothing."""
        form_process_group(self._world, backend, timeout)

    @property
    def creates_processes_externally(self) -> bool:
        """The launcher has started all processes."""
        return True

    @property
    def main_address(self) -> str:
        """Not used: the process group forms through the rendezvous."""
        return ""

    @property
    def main_port(self) -> int:
        """Not used."""
        return 0

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """The rendezvous has decided it."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """The rendezvous has decided it."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        """Lightning shows it only."""
        return self._world.rank // self._world.local_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise LaunchError if the Trainer expects another number of learners."""
        if num_devices * num_nodes != self._world.size:
            raise LaunchError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) expects {num_devices * num_nodes} learners, but the run "
                f"has {self._world.size}; give as `devices` the learners of a machine, and as `num_nodes` the number of machines"
            )


_TOO_LATE = (
    "a learner cannot join a run of Lightning that is under way: Lightning's process group keeps its size. The other learners go "
    "on; to train with all of them again, start the run anew with fit(ckpt_path=...)"
)

"""D-PSGD (Lian et al. 2017, Algorithm 1): mix with the neighbours of the round while computing the gradient."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import torch

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import RefusedError
from roundelay.strategies.base import Strategy, fingerprint, mixing_over, spread
from roundelay.topology import Family, Mixing, family
from roundelay.transport.base import Swap, Transport
from roundelay.weights.flat import NON_FINITE, Flat, all_finite
from roundelay.weights.replica import Replica


class DPSGD(Strategy):
    r"""$x_i \leftarrow \sum_j W_{ij}(k) x_j - \alpha g(x_i)$.

    Neighbours swap the weights of step k during its forward and backward pass. When the swap has ended, a thread of the
    transport mixes the neighbours' weights into the buffer that was sent. The optimizer applies the gradient, which was
    taken at the learner's own $x_i$, to the mixed weights. Waits for the neighbours of the round. Extra
    memory: one copy of the model to send, and one per neighbour.

    Args:
        topology: a name, a graph file, `module:function`, or a function from the number of learners to a Mixing.
    """

    def __init__(self, topology: str | Mixing | Family = "random-ring") -> None:
        self._family = family(topology)
        self.round = 0
        self._stepping = False

    def agreement(self, size: int, local_size: int) -> str:
        """The graph: swaps are mutual only if all learners have the same one."""
        return super().agreement(size, local_size) + fingerprint(self._family(size))

    def begin_at(self, step: int) -> None:
        """One step is one round."""
        self.round = step

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Send the first weights."""
        super().attach(replica, transport, membership)
        self._mixing = mixing_over(self._family, membership)
        self._position = membership.position(transport.rank)
        self._own = replica.mirror(transport.allocate)
        transport.layout = self._own.layout.code
        self._incoming: list[Flat] = []
        self._disagreement2, self._measure = 0.0, False
        self._restarted = False
        self._mixing_lock = threading.Lock()  # guards the two below, and `_own` once a swap has ended
        self._finished = False
        self._row: dict[int, float] = {}
        self._swaps = 0
        self._swaps_with: Counter[int] = Counter()
        self._send()

    def _send(self) -> None:
        """Start the swap of this round's weights."""
        row = self._mixing.row(self._position, self.round)
        self._own_weight = row.pop(self._position, 0.0)
        self._row = {self.membership.living[position]: weight for position, weight in row.items()}
        while len(self._incoming) < len(self._row):
            self._incoming.append(Flat(self._own.views, self.transport.allocate))
        buffers = {peer: flat.storage for peer, flat in zip(self._row, self._incoming, strict=False)}
        # Numbered apart from rounds, which load_state_dict may set back.
        mixed: Future[None] = Future()
        self._mixed = mixed
        wait = self.replica.wait_until_readable
        swap = self.transport.swap(Swap(self._swaps, self._own.storage, buffers, wait))
        self._swaps += 1
        self._swaps_with.update(self._row.keys())
        swap.add_done_callback(lambda swap: self._swapped(swap, mixed))

    def _swapped(self, swap: Future[None], mixed: Future[None]) -> None:
        """The neighbours' weights are here: mix them in. In a thread of the transport, or on the virtual clock."""
        try:
            swap.result()
            with self._mixing_lock:
                if not self._finished:
                    self._mix()
                    self.replica.stage(self._own)
        except BaseException as error:  # raised by the next step
            mixed.set_exception(error)
        else:
            mixed.set_result(None)

    def before_step(self) -> Steps:
        """x_i <- sum_j W_ij x_j; the optimizer works on that until `after_step`.

        Raises RefusedError, with the module's weights as they were, if a neighbour's weights are not finite.
        """
        self.abandon()
        yield self._mixed
        if self._restarted:  # that swap was of the weights from before load_state_dict
            self._restarted = False
            self.replica.restart(self._own)
            self._send()
            yield self._mixed
        self._stepping = True
        self.replica.begin_step(self._own)

    def _mix(self) -> None:
        """As a running mean, neighbours in ascending order: one pass over the weights for each."""
        if self._measure:
            self._disagreement2 = self._mean_disagreement2()
            self._measure = False
        total = self._own_weight
        for weight, flat in zip(self._row.values(), self._incoming, strict=False):
            total += weight
            for mean, theirs in zip(self._own.parts, flat.parts, strict=True):
                mean.lerp_(theirs, weight / total)
        if self._row and not all_finite(self._own.parts):  # a mean of finite weights is finite
            self._refuse_non_finite()

    def _refuse_non_finite(self) -> None:
        """Raise RefusedError for the neighbour with non-finite weights; if only our own are, the peers refuse us."""
        peers = zip(self._row, self._incoming, strict=False)
        peer = next((peer for peer, flat in peers if not all_finite(flat.parts)), None)
        if peer is not None:
            self.replica.copy_to(self._own)
            self.transport.refused.count(NON_FINITE, f"a swap of learner {peer}")
            raise RefusedError(peer, NON_FINITE)

    def after_step(self) -> Steps:
        """Send the new x_i, which travels while the next gradient is computed."""
        self.abandon()
        self.round += 1
        self._send()
        yield from ()

    def abandon(self) -> None:
        """End the step. The module gets the weights that the step left, also if the optimizer raised."""
        if self._stepping:
            self._stepping = False
            self.replica.end_step(self._own)
            self.replica.follow(self._own)

    def drain(self) -> Steps:
        """The swap under way belongs to the next step; no peer waits for more than what was sent."""
        self.abandon()
        yield from ()

    def finish(self) -> Steps:
        """Answer the swaps of slower learners with the final weights until all have finished."""
        self.abandon()
        if self._restarted:  # and no step taken since: what was sent last is from before load_state_dict
            yield self._mixed
        with self._mixing_lock:
            self._finished = True
            self.replica.restart(self._own)  # it may have been mixed already
        yield self.transport.finish(self._own.storage, self.membership.living)

    def _mean_disagreement2(self) -> float:
        """Mean of |x_i - x_j|^2 over the neighbours, piece by piece: allocating a whole temporary would be slow."""
        distances2 = [
            float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2
            for flat, _ in zip(self._incoming, self._row, strict=False)
            for x, y in zip(self._own.pieces, flat.pieces, strict=True)
        ]
        return sum(distances2) / max(len(self._row), 1)

    def metrics(self) -> dict[str, float]:
        """Rounds, swaps with each peer, and the spread in the first round after the previous call of `metrics`."""
        self._measure = True
        return {"rounds": self.round, "spread": spread(self._disagreement2, self.membership.size)} | {
            f"exchanges_with_{peer}": count for peer, count in sorted(self._swaps_with.items())
        }

    def state_dict(self) -> dict[str, Any]:
        """The round; weights under way are sent again."""
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in that round, with the weights that the module has now. All learners do so before their next step."""
        self.abandon()
        self.round = int(state["round"])
        self._restarted = True

"""D-PSGD (Lian et al. 2017, Algorithm 1): mix with the neighbours of the round while computing the gradient."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Any

import torch

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import RefusedError
from roundelay.strategies.base import Strategy, check_size, fingerprint, flat_with_shadow
from roundelay.strategies.pair_average import PIECE
from roundelay.topology import Mixing
from roundelay.transport.base import Transport
from roundelay.weights.replica import NON_FINITE, Flat, Replica, all_finite


class DPSGD(Strategy):
    r"""$x_i \leftarrow \sum_j W_{ij}(k) x_j - \alpha g(x_i)$.

    The swap of $x_k$ runs during forward and backward of step k. Before the step, weights are mixed in the buffer that the
    first neighbour's came in; the optimizer applies the gradient, taken at the learner's own $x_i$, to them there, so that they
    can go out as they are, while the module shows them where memory can be there twice (`Shadow`), or has a copy. Waits for the
    neighbours of the round. Extra memory: one copy of the model to send, and one per neighbour.

    Args:
        mixing: $W_k$, for as many learners as take part.
    """

    def __init__(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self.round = 0
        self._stepping = False

    def agreement(self, local_size: int) -> str:
        """Exchanges are mutual only if all have the same mixing."""
        return super().agreement(local_size) + fingerprint(self.mixing)

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Send the first weights."""
        check_size(self.mixing, membership)
        super().attach(replica, transport, membership)
        self._position = membership.position(transport.rank)
        self._outgoing = flat_with_shadow(replica.tensors(), transport)
        transport.layout = self._outgoing.layout.code
        self._incoming: list[Flat] = []
        self._disagreement2, self._measure = 0.0, False
        self._restarted = False
        self._swaps = 0
        self._edges: Counter[int] = Counter()
        self.replica.copy_to(self._outgoing)
        self._send()

    def _send(self) -> None:
        """Start the swap of this round's weights."""
        row = self.mixing.row(self._position, self.round)
        self._own_weight = row.pop(self._position, 0.0)
        self._row = {self.membership.living[position]: weight for position, weight in row.items()}
        while len(self._incoming) < len(self._row):
            like = self._outgoing.views  # the first one will go out, and is shown then
            flat = Flat(like, self.transport.allocate) if self._incoming else flat_with_shadow(like, self.transport)
            self._incoming.append(flat)
        buffers = {peer: flat.storage for peer, flat in zip(self._row, self._incoming, strict=False)}
        # Numbered apart from rounds, which load_state_dict may set back.
        self._swap: Future[None] = self.transport.swap(self._swaps, self._outgoing.storage, buffers)
        self._swaps += 1
        self._edges.update(self._row.keys())

    def before_step(self) -> Steps:
        """x_i <- sum_j W_ij x_j, and the optimizer works on that until after_step.

        Raises RefusedError, with the module's weights as they were, if a neighbour's are not finite.
        """
        self.abandon()
        yield self._swap
        if self._restarted:  # that swap was of the weights from before load_state_dict
            self._restarted = False
            self.replica.copy_to(self._outgoing)
            self._send()
            yield self._swap
        if self._measure:
            self._disagreement2 = self._mean_disagreement2()
            self._measure = False
        self._mix()
        self._row, self._own_weight = {}, 1.0  # if this step raises, the next one must not mix the same weights again
        self._stepping = True
        self.replica.lend(self._outgoing)

    def _mix(self) -> None:
        """As a running mean, neighbours in ascending order: one pass over the weights for each.

        Where the first one's came in; they were sent from there last time, or will be next time. So if it comes to nothing, the
        weights that the module shows are as they were.
        """
        if not self._row:
            return
        total, mixed = self._own_weight, self._incoming[0]
        own = self._outgoing.parts
        for weight, flat in zip(self._row.values(), self._incoming, strict=False):
            total += weight
            for mean, theirs, result in zip(own, flat.parts, mixed.parts, strict=True):
                torch.lerp(mean, theirs, weight / total, out=result)
            own = mixed.parts
        if not all_finite(mixed.parts):  # a mean of finite weights is finite, so somebody's are not
            self._refuse_non_finite()
        self._outgoing, self._incoming[0] = mixed, self._outgoing

    def _refuse_non_finite(self) -> None:
        """Raise RefusedError for the neighbour that is to blame; if none is, they will refuse us."""
        if not all_finite(self._outgoing.parts):
            return
        first, *others = zip(self._row, self._incoming, strict=False)
        peer = next((peer for peer, flat in others if not all_finite(flat.parts)), first[0])  # its own are mixed over
        self.transport.refused.count(NON_FINITE, f"a swap of learner {peer}")
        raise RefusedError(peer, NON_FINITE)

    def after_step(self) -> Steps:
        """The new x_i goes out; it is on its way while the next gradient is computed."""
        self.abandon()
        self.round += 1
        self._send()
        yield from ()

    def abandon(self) -> None:
        """End the step: the module has what became of it, also if it raised between the hooks."""
        if self._stepping:
            self._stepping = False
            if self.replica.take_back(self._outgoing):
                self.replica.copy_from(self._outgoing)

    def drain(self) -> Steps:
        """The swap under way is part of the next step, and nobody waits for more than what it has sent."""
        self.abandon()
        yield from ()

    def finish(self) -> Steps:
        """Answer the swaps of slower learners with the final weights until all have finished."""
        self.abandon()
        if self._restarted:  # and no step taken since: what was sent last is from before load_state_dict
            yield self._swap
            self.replica.copy_to(self._outgoing)
        yield self.transport.finish(self._outgoing.storage, self.membership.living)

    def _mean_disagreement2(self) -> float:
        """|x_i - x_j|^2, mean over the neighbours; piece by piece, for fresh memory of a model's size takes long to get."""
        distances2 = [
            float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2
            for flat, _ in zip(self._incoming, self._row, strict=False)
            for own, theirs in zip(self._outgoing.parts, flat.parts, strict=True)
            for x, y in zip(own.split(PIECE), theirs.split(PIECE), strict=True)
        ]
        return sum(distances2) / max(len(self._row), 1)

    def metrics(self) -> dict[str, float]:
        """Rounds, the spread that the neighbours of the round after the last call showed, and swaps with each peer."""
        self._measure = True
        return {"rounds": self.round, "spread": spread(self._disagreement2, self.membership.size)} | {
            f"exchanges_with_{peer}": count for peer, count in sorted(self._edges.items())
        }

    def state_dict(self) -> dict[str, Any]:
        """The round; what is under way is sent again."""
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in that round, with the weights that the module has now. All learners do so before their next step."""
        self.abandon()
        self.round = int(state["round"])
        self._restarted = True


def spread(disagreement2: float, size: int) -> float:
    """Rms distance from consensus, from the mean squared distance of two learners: E|x_i - x_j|^2 = 2 n/(n-1) spread^2."""
    return (disagreement2 * (size - 1) / (2 * size)) ** 0.5 if size > 1 else 0.0

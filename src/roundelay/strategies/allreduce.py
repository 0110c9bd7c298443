"""SSGD: every step applies the mean gradient of all learners, reduced in buckets while backward is still running."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from roundelay.clock import Steps
from roundelay.cluster.membership import Membership
from roundelay.errors import StrategyError
from roundelay.strategies.base import Strategy
from roundelay.transport.base import Transport
from roundelay.weights import Flat, Replica

BUCKET_BYTES = 25 * 2**20  # as DDP's: each collective has a fixed cost, so many small ones are slower
FIRST_BUCKET_BYTES = 2 * 2**20  # smaller, so that communication starts early


class _Bucket:
    """Gradients of one dtype that are reduced together, with two kinds of counts behind them.

    The counts are the number of active learners and, for each gradient, the number of learners that have it. They are of
    the gradients' dtype, so they are exact up to 256 learners in bfloat16.
    """

    def __init__(self, indices: list[int], weights: Sequence[Tensor]) -> None:
        self.indices = indices
        gradients = [weights[index].detach() for index in indices]
        counts = gradients[0].new_empty(1 + len(gradients))
        self.flat = Flat([*gradients, counts], on=counts.device)
        self.waiting = set(indices)
        self.views = dict(zip(indices, self.flat.views[:-1], strict=True))  # of each weight's gradient
        self._used: list[bool] = []
        self._own_counts = self._counts

    def take(self, index: int, gradient: Tensor | None) -> None:
        """Copy the gradient of weight `index` in; None counts as zero."""
        if gradient is not None and gradient.layout != torch.strided:
            raise StrategyError(
                "sparse gradients cannot be reduced; use sparse=False, or a strategy that averages weights (DPSGD, ADPSGD)"
            )
        self.views[index].zero_() if gradient is None else self.views[index].copy_(gradient)
        self.waiting.discard(index)

    @property
    def _counts(self) -> Tensor:
        return self.flat.views[-1]

    @property
    def active(self) -> Tensor:
        return self._counts[0]

    @property
    def users(self) -> Tensor:
        """For each gradient, how many learners have it."""
        return self._counts[1:]

    def count(self, used: list[bool]) -> None:
        """Set this learner's own counts: it is active and has these gradients."""
        if used != self._used:  # rare: usually every weight has a gradient
            self._used, self._own_counts = used, self._counts.new_tensor([1, *used])
        self._counts.copy_(self._own_counts)


class Allreduce(Strategy):
    r"""$x \leftarrow x - \alpha \frac1n \sum_j g_j(x)$, like DistributedDataParallel.

    Gradients are the mean when `backward()` returns, so the user's clipping and GradScaler see the mean. A weight that has no
    gradient on any learner keeps none. Waits for all learners. Learners may take unequal numbers of steps: those that
    have finished contribute nothing, and the mean is over the others.
    """

    reduces_gradients = True
    mixes_weights = False
    needs_equal_weights = True
    takes_groups = False

    def attach(self, replica: Replica, transport: Transport, membership: Membership) -> None:
        """Sort the weights into buckets, last layers first, because their gradients come first."""
        super().attach(replica, transport, membership)
        self._buckets = [_Bucket(indices, replica.weights) for indices in _bucket_indices(replica)]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._futures: list[Future[None]] = []
        self._started = 0
        self._steps = 0
        self.active = membership.size  # learners that took part in the last reduction

    def gradient_ready(self, index: int) -> None:
        """Copy the gradient into its bucket, and reduce full buckets, in the one order that all learners share."""
        self._bucket_of[index].take(index, self.replica.weights[index].grad)
        while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
            self._start(self._buckets[self._started], active=1.0)

    def _start(self, bucket: _Bucket, active: float) -> None:
        if active:
            for index in tuple(bucket.waiting):  # this backward gave them no gradient
                bucket.take(index, self.replica.weights[index].grad)
            bucket.count([self.replica.weights[index].grad is not None for index in bucket.indices])
        else:
            bucket.flat.storage.zero_()
        self._futures.append(self.transport.all_reduce(bucket.flat.parts[0], self.membership.living))
        self._started += 1

    def after_backward(self) -> Steps:
        """Reduce the remaining buckets; the means of one are written back while the next ones still travel."""
        for bucket, future in self._all_started(active=1.0):
            yield future
            self.active = round(float(bucket.active))
            self._put_means_in_place(bucket)
        self._steps += 1

    def _all_started(self, active: float) -> list[tuple[_Bucket, Future[None]]]:
        """Start every bucket that is not under way yet, and reset for the next backward."""
        while self._started < len(self._buckets):
            self._start(self._buckets[self._started], active)
        under_way = list(zip(self._buckets, self._futures, strict=True))
        self._futures, self._started = [], 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.indices)
        return under_way

    def _put_means_in_place(self, bucket: _Bucket) -> None:
        for position, (index, view) in enumerate(bucket.views.items()):
            weight = self.replica.weights[index]
            if weight.grad is None:
                if not bucket.users[position]:  # no learner has one, and optimizers treat None and zero differently
                    continue
                weight.grad = torch.empty_like(weight)
            torch.div(view, self.active, out=weight.grad)

    def finish(self) -> Steps:
        """Contribute zeros until no learner is active."""
        while self.active:
            for bucket, future in self._all_started(active=0.0):
                yield future
                self.active = round(float(bucket.active))

    def metrics(self) -> dict[str, float]:
        """Reductions so far."""
        return {"rounds": self._steps}


def _bucket_indices(replica: Replica) -> list[list[int]]:
    """Weights in reverse order, grouped by dtype and device up to the bucket size."""
    buckets: list[list[int]] = []
    sizes: list[int] = []
    limit = FIRST_BUCKET_BYTES
    open_bucket: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in reversed(range(len(replica.weights))):
        weight = replica.weights[index]
        kind = (weight.dtype, weight.device)
        at = open_bucket.get(kind)
        if at is None or (sizes[at] and sizes[at] + weight.nbytes > limit):
            at = open_bucket[kind] = len(buckets)
            buckets.append([])
            sizes.append(0)
            limit = FIRST_BUCKET_BYTES if at == 0 else BUCKET_BYTES
        buckets[at].append(index)
        sizes[at] += weight.nbytes
    return buckets

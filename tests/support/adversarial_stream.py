"""An accelerator made of CPU tensors. Its side stream runs as late as ordering allows: a missing wait gives wrong numbers."""

from __future__ import annotations

import random
import threading

import torch


class AdversarialMark:
    """A point in the order of the stream. `None` as its stream means that it was taken before anything was queued."""

    def __init__(self, stream, position):
        self._stream, self._position = stream, position

    def synchronize(self):
        self._stream.run_up_to(self._position)


class AdversarialStream:
    """Operations wait in a queue until a mark behind them is waited for; with a seed, some run earlier, at random.

    The user's own operations (the compute stream) run at once, as always on the CPU. An operation that is queued in the middle of
    a step, or after it without `wait_for_compute`, could run before the optimizer on a real device: here its source is garbage.
    """

    def __init__(self, device=None, seed=None):
        self._lock = threading.RLock()
        self._queue, self._done, self._queued = [], 0, 0
        self._ordered = False
        self._random = None if seed is None else random.Random(seed)

    def copy(self, target, source):
        self._add(target.copy_, source)

    def add(self, target, source, factor):
        self._add(lambda value: target.add_(value, alpha=factor), source)

    def _add(self, operation, source):
        with self._lock:
            ordered = self._ordered

            def run():
                operation(source if ordered else torch.full_like(source, torch.nan))

            self._queue.append(run)
            self._queued += 1
            if self._random is not None:
                self.run_up_to(self._random.randint(self._done, self._queued))

    def mark(self):
        return AdversarialMark(self, self._queued)

    def wait_for_compute(self):
        self._ordered = True

    def hold_compute(self, mark):
        mark.synchronize()
        self._ordered = False  # a step begins: what is queued from here on is not ordered with it

    def run_up_to(self, position):
        with self._lock, torch.no_grad():
            while self._done < position:
                self._queue.pop(0)()
                self._done += 1

"""Ctrl-C and SIGTERM: finish the step, save, and end. Learners that step together first agree on the last step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType

from roundelay import threads
from roundelay.cluster.rendezvous.client import RendezvousClient

log = logging.getLogger("roundelay")


class StopRequest:
    """Counts the steps that the learner begins, and after a request says which step is the last.

    Args:
        last_step: takes the number of steps that this learner has begun. Returns the number of steps after which all
            learners that step together end. The call may wait for these learners, so it runs in its own thread.

    Attributes:
        requested: whether the learner was asked to stop.
    """

    def __init__(self, last_step: Callable[[int], int]) -> None:
        self._last_step = last_step
        self._begun = self._begun_at_request = 0
        self._limit: Future[int] = Future()
        self.requested = False
        self._wake_reader, self._wake_writer = os.pipe()
        threads.start("stop", self._agree)

    def listen(self) -> None:
        """Make SIGINT and SIGTERM request a stop. Does nothing in other threads, which may not set handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.request()

    def request(self) -> None:
        """Ask the learner to stop. Safe in a signal handler, because it takes no lock."""
        if not self.requested:
            # Set the flag before reading the count: then a step that began without seeing the flag is in the count.
            self.requested = True
            self._begun_at_request = self._begun
            with contextlib.suppress(BrokenPipeError):  # after `close` there is no step left to end
                os.write(self._wake_writer, b"!")

    def begin_step(self) -> bool:
        """Whether to take another step. After a request, the first call waits until the last step is agreed on."""
        self._begun += 1
        if self.requested and self._begun > self._limit.result():
            self._begun -= 1
            return False
        return True

    def close(self) -> None:
        """End the thread. To be called after the last step."""
        if not self.requested:
            os.write(self._wake_writer, b".")

    def _agree(self) -> None:
        os.read(self._wake_reader, 1)
        os.close(self._wake_reader)
        if not self.requested:
            return
        try:
            self._limit.set_result(self._last_step(self._begun_at_request))
        except BaseException as error:  # the training thread raises it
            self._limit.set_exception(error)


class Stopping:
    """Whether one learner stops, with the run or alone.

    Args:
        client: tells when the run is to be stopped, and agrees on the last step.

    Attributes:
        guest: the learner did not begin the run. If a signal asks it to stop, it leaves, and the run goes on.
    """

    def __init__(self, client: RendezvousClient) -> None:
        self._client = client
        self.guest = False
        self._request: StopRequest | None = None
        self._run_stops = False
        client.on_stop = self._told

    def _told(self, reason: str) -> None:
        """Called in the client's thread when the rendezvous stops the run."""
        log.warning("learner %s stops: %s", self._client.id, reason)
        self._run_stops = True
        if self._request is not None:
            self._request.request()

    @property
    def asked(self) -> bool:
        """Whether this learner was asked to stop."""
        return self._run_stops or (self._request is not None and self._request.requested)

    @property
    def leaves_alone(self) -> bool:
        """Whether a stop of this learner leaves the run as it is."""
        return self.guest and not self._run_stops

    def request(self, *, together: bool) -> StopRequest:
        """A new `StopRequest` for the steps that follow. If this learner was asked to stop before, it is already set.

        With `together`, learners that step together agree on the last step.
        """

        def last_step(begun: int) -> int:
            return self._client.stop.last_step(begun) if together and not self.leaves_alone else begun

        asked = self.asked
        self._request = StopRequest(last_step)
        self._request.listen()
        if asked:
            self._request.request()
        return self._request

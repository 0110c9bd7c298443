"""Groups form by waiting for their members, in engines that know nothing of the watch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Group = TypeVar("Group")
Hopeless = Callable[[tuple[int, ...]], bool]
"""Whether one of these members is known to be lost, so that a group of them will never form."""

LOOK_S = 0.5  # how soon somebody who waits notices what the watch says


def formed(form: Callable[[], Group], members: tuple[int, ...], hopeless: Hopeless) -> Group:
    """What `form` makes, in a thread of its own.

    Raises ConnectionError if a member is lost before that.
    """
    future: Future[Group] = Future()

    def work() -> None:
        try:
            future.set_result(form())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="roundelay-form", daemon=True).start()
    while not future.done():
        with contextlib.suppress(TimeoutError):
            future.exception(timeout=LOOK_S)
        if hopeless(members):
            raise ConnectionError("a member of the group was lost while it was being formed")
    return future.result()

"""The number of files, sockets among them, that a process may have open."""

from __future__ import annotations

import resource

from roundelay.errors import ConfigError

_BASE, _PER_LEARNER = 64, 8  # 18 and 5 were measured; reading a checkpoint opens one more per learner


def allow_open_files(learners: int) -> None:
    """Let this process, and those that it starts, open as many files as a run of so many learners needs.

    Raises ConfigError if the system does not allow so many.
    """
    needed = _BASE + _PER_LEARNER * learners
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a run of {learners} learners needs up to {needed} open files per process, and the limit is {hard}; raise it "
            f"with `ulimit -n {needed}`, or use fewer --learners"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

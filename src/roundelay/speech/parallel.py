"""Work on many utterances in parallel processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from roundelay.speech.libraries import library

Job = TypeVar("Job")
Result = TypeVar("Result")


def in_processes(
    function: Callable[..., dict[str, Result]], jobs: Mapping[str, Job], workers: int | None, *arguments: object
) -> dict[str, Result]:
    """Split jobs into one share per process and call function(share, *arguments) there. Results are in the order of the jobs.

    `workers` is the number of processes, by default one per available processor. Threads would not help, because
    kaldi-decoder holds Python's global lock.
    """
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(jobs)))
    if workers == 1:
        return function(jobs, *arguments)
    joblib = library("joblib", "decoding in parallel")
    names = list(jobs)
    shares = [{name: jobs[name] for name in names[i::workers]} for i in range(workers)]
    found = joblib.Parallel(n_jobs=workers)(joblib.delayed(function)(share, *arguments) for share in shares)
    merged = {name: result for part in found for name, result in part.items()}
    return {name: merged[name] for name in jobs}

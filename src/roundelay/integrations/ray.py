"""Ray: `run(train, learners=8)` starts one actor per learner; a lost one is started again on another node and joins the run."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roundelay import threads
from roundelay.cluster.elastic_world import JOINS, LEARNER, PROCESS, Rendezvous
from roundelay.cluster.ticket import TICKET
from roundelay.errors import LaunchError, MissingExtraError

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtraError("running learners on Ray", "ray") from error

log = logging.getLogger("roundelay")

LOOK_EVERY_S, ALIVE_EVERY_S = 0.5, 1.0
SILENT_AFTER_S = 15.0  # an actor silent for so long has no process: Ray starts it again, or has no node for it

Report = Callable[[int, dict[str, Any]], None]
_own: tuple[Any, int] | None = None  # in the process of a learner: the actor with the rendezvous, and the learner's id


def run(
    fn: Callable[..., Any],
    config: object = None,
    *,
    learners: int,
    resources: Mapping[str, float] | None = None,
    restarts: int = -1,
    min_learners: int = 1,
    open_collectives: bool = False,
    on_report: Report = lambda learner, figures: None,
) -> dict[int, Any]:
    """Train with one Ray actor per learner, spread over the nodes of the cluster, and wait until the run has ended.

    Every actor calls `fn`, which makes a `roundelay.Learner` without `world`. When an actor or its node is lost, the other
    learners go on. Ray starts the actor again, and `fn` is called anew: its Learner joins the run. An exception in `fn` ends
    that learner only. A cluster that runs already is used, as `ray.init()` finds it.

    Args:
        fn: called with `config` if that is given, else without arguments.
        config: any object that can be pickled.
        learners: how many learners begin together.
        resources: of one learner, such as {"CPU": 4, "GPU": 1}; by default one CPU.
        restarts: how often Ray may start one learner again; -1 for no limit.
        min_learners: with fewer living learners the run stops.
        open_collectives: allow Gloo and NCCL, which have no authentication, between nodes. `consensus` and all strategies
            except ADPSGD need them.
        on_report: called in this process with the learner's id and the figures that the learner gave to `report`.

    Returns what `fn` has returned, by learner; a learner that was lost for good is missing.

    Raises the error of the first learner that failed, if no learner has finished.
    """
    if not ray.is_initialized():
        ray.init()
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"roundelay-{secrets.token_hex(8)}"
    hub = (
        ray.remote(_Hub)
        .options(name=name, num_cpus=0, scheduling_strategy=here)
        .remote(learners, min_learners, open_collectives)
    )
    custom = dict(resources or {"CPU": 1})
    actor = ray.remote(_LearnerActor).options(
        num_cpus=custom.pop("CPU", 0),
        num_gpus=custom.pop("GPU", 0),
        resources=custom,
        max_restarts=restarts,
        max_task_retries=restarts,  # Ray calls `train` again in an actor that it has started again
        scheduling_strategy="SPREAD",
    )
    actors = [actor.remote(name, learner) for learner in range(learners)]
    try:
        return _results({each.train.remote(fn, config): i for i, each in enumerate(actors)}, hub, on_report)
    finally:
        for each in [*actors, hub]:
            ray.kill(each)


def script(path: str, arguments: Sequence[str] = ()) -> Callable[[], None]:
    """A function for `run` that executes a Python file, as `roundelay launch` does. Nodes need not have the file."""
    text = Path(path).read_text()

    def main() -> None:
        sys.argv = [path, *arguments]
        exec(compile(text, path, "exec"), {"__name__": "__main__"})

    return main


def report(figures: Mapping[str, Any]) -> None:
    """Send figures, such as `learner.metrics()`, from a learner to the `on_report` of `run`. Does not wait."""
    if _own is None:
        raise LaunchError("report() works in a function that roundelay.integrations.ray.run has started")
    hub, learner = _own
    hub.report.remote(learner, dict(figures))


def _results(pending: dict[Any, int], hub: Any, on_report: Report) -> dict[int, Any]:  # noqa: ANN401
    """Wait for the learners, but not for those that cannot come back because the run has ended without them."""
    results: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    while pending:
        done, _ = ray.wait(list(pending), timeout=LOOK_EVERY_S)
        for each in done:
            learner = pending.pop(each)
            try:
                results[learner] = ray.get(each)
            except ray.exceptions.RayError as error:
                errors[learner] = error
                log.warning("learner %d is lost: %s", learner, str(error).strip().splitlines()[-1])
                ray.get(hub.died.remote(learner, type(error).__name__))
        reports, gone = ray.get(hub.look.remote())
        for learner, figures in reports:
            on_report(learner, figures)
        if results:
            pending = {each: learner for each, learner in pending.items() if learner not in gone}
    if not results:
        raise next(iter(errors.values()))
    return results


class _Hub:
    """The rendezvous of a run, on the driver's node: without its driver the run would end anyway."""

    def __init__(self, learners: int, min_learners: int, open_collectives: bool) -> None:  # noqa: FBT001
        host = ray.util.get_node_ip_address()
        self._rendezvous = Rendezvous(learners, host, min_learners=min_learners, open_collectives=open_collectives)
        self._reports: list[tuple[int, dict[str, Any]]] = []
        self._heard = dict.fromkeys(range(learners), time.monotonic())
        self._begun: set[int] = set()

    def begin(self, learner: int) -> tuple[str, bool]:
        """The text of the ticket, and whether this learner, which was started again, must join a run that is under way."""
        self.alive(learner)
        again = learner in self._begun
        self._begun.add(learner)
        return str(self._rendezvous.ticket), again and self._rendezvous.server.formed()

    def alive(self, learner: int) -> None:
        self._heard[learner] = time.monotonic()

    def report(self, learner: int, figures: dict[str, Any]) -> None:
        self._reports.append((learner, figures))

    def died(self, learner: int, reason: str) -> None:
        self._rendezvous.server.died(learner, reason)

    def look(self) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
        """New reports, and learners without a process. The second list stays empty while a learner is alive to join."""
        reports, self._reports = self._reports, []
        server, now = self._rendezvous.server, time.monotonic()
        silent = [learner for learner, heard in self._heard.items() if now - heard > SILENT_AFTER_S]
        return reports, silent if server.formed() and not server.living() else []


class _LearnerActor:
    """One learner. Ray makes a new one, in a new process, when this one is lost."""

    def __init__(self, hub_name: str, learner: int) -> None:
        global _own  # noqa: PLW0603 - a process has one learner
        hub = ray.get_actor(hub_name)
        _own = hub, learner
        ticket, joins = ray.get(hub.begin.remote(learner))
        names = {TICKET: ticket, LEARNER: str(learner), PROCESS: str(learner), JOINS: str(int(joins))}
        os.environ.update(names)
        if joins:
            log.warning("learner %d is started again on node %s", learner, ray.util.get_node_ip_address())
        threads.start("ray-alive", lambda: self._stay_alive(hub, learner))

    def train(self, fn: Callable[..., Any], config: object) -> Any:  # noqa: ANN401
        return fn() if config is None else fn(config)

    @staticmethod
    def _stay_alive(hub: Any, learner: int) -> None:  # noqa: ANN401
        while True:
            hub.alive.remote(learner)
            time.sleep(ALIVE_EVERY_S)

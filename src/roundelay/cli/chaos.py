"""`roundelay chaos`: train twice, without and with faults, and compare. Faults kill, freeze or add learners."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from roundelay.cli.arguments import add_configuration, add_recipe, configured, dated_folder, positive_int
from roundelay.errors import RoundelayError, UsageError

if TYPE_CHECKING:
    from roundelay.simulation.fault_schedule import Schedule

FAULTS = ("kill", "freeze", "join")
Result = TypeVar("Result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add_recipe(parser, "as for `roundelay train`; not needed with --simulated", optional=True)
    add_configuration(parser)
    repeated: dict[str, Any] = {"action": "append", "default": []}
    add("--kill", metavar="LEARNER@TIME", **repeated, help="kill a learner TIME seconds after the first row of metrics")
    add(
        "--freeze",
        metavar="LEARNER@TIME:DURATION",
        **repeated,
        help="freeze a learner at this time, for DURATION seconds",
    )
    add("--join", metavar="LEARNER@TIME", **repeated, help="start another learner, or restart one that was killed")
    add(
        "--campaign",
        type=positive_int,
        metavar="N",
        help="N random faults: kills with restarts, and freezes; one learner always trains",
    )
    add("--every", default="5s", metavar="TIME", help="with --campaign: time between two faults (default: 5s)")
    add("--simulated", action="store_true", help="random faults on the virtual clock, instead of real processes")
    add("--schedules", type=positive_int, metavar="N", help="with --simulated: how many, from --seed on (default 100)")
    add("--out", type=Path, metavar="DIR", help="keep both runs here (default: runs/chaos-RECIPE-DATE-TIME)")
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Train twice, and print what the faults have cost. Raises RoundelayError if a fault did not happen."""
    from roundelay.bench import campaign, chaos
    from roundelay.training import recipes

    if args.simulated:
        return _simulate(args)
    if args.recipe is None or args.schedules is not None:
        raise UsageError("chaos needs a RECIPE, such as tiny; or --simulated, which takes --schedules N and --seed S")
    config = recipes.resolve(recipes.table_of(args.recipe), configured(args))
    faults = sorted(chaos.Fault.parsed(kind, text) for kind in FAULTS for text in getattr(args, kind))
    if args.campaign is not None:
        faults = campaign.drawn(config, args.campaign, _seconds(args.every), config.seed)
    folder = args.out or dated_folder(args.recipe, "chaos-")
    result = chaos.run(config, faults, folder, patient=args.campaign is not None)
    if args.campaign is not None:
        result["campaign"] = campaign.summary(result, folder)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result, folder)
    _refuse_unhappened(result, len(faults))
    return 0 if result["disturbed"]["finished"] else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds < 3600:
        raise UsageError(f"--every needs a time such as 5s, got '{text}'")
    return seconds


def _refuse_unhappened(result: dict[str, Any], count: int) -> None:
    never = [f"{fault['option']}: {fault['reason']}" for fault in result["faults"] if fault["happened_s"] is None]
    if never:
        raise RoundelayError(
            f"{len(never)} of {count} faults did not happen ({'; '.join(never)}), so this run has not shown that it "
            "survives them; use an earlier time or more --epochs"
        )


def _simulate(args: argparse.Namespace) -> int:
    """Run fault schedules on the virtual clock until one breaks an invariant; then print the smallest such schedule."""
    import torch

    from roundelay.simulation.fault_schedule import Schedule
    from roundelay.simulation.fault_world import FaultWorld
    from roundelay.simulation.invariants import INVARIANTS

    if args.recipe is not None or args.kill or args.freeze or args.join or not (args.seed or "0").isdecimal():
        raise UsageError("--simulated draws its learners and faults from --seed S, a whole number; leave out the rest")
    torch.set_num_threads(1)
    gc.freeze()  # the modules loaded so far are not searched for garbage again and again: a fifth of the time
    seeds = range(int(args.seed or 0), int(args.seed or 0) + (args.schedules or 100))
    faults, began = 0, time.perf_counter()
    for seed in seeds:
        schedule = Schedule.drawn(seed)
        faults += len(schedule.faults)
        if violations := _quietly(FaultWorld(schedule).run):
            _print_violations(schedule, violations)
            raise RoundelayError(
                f"seed {seed} breaks an invariant; replay it with: roundelay chaos --simulated --schedules 1 --seed {seed}"
            )
    pace = len(seeds) / (time.perf_counter() - began) * 60
    print(
        f"{len(seeds)} schedules (seeds {seeds[0]} to {seeds[-1]}) with {faults} faults, {pace:,.0f} a minute; in each:"
    )
    for name, meaning in INVARIANTS.items():
        print(f"  {name}: {meaning}")
    return 0


def _print_violations(schedule: Schedule, violations: list[str]) -> None:
    """Print what was found, the smallest schedule that still has it, and its timeline."""
    from roundelay.simulation.fault_world import FaultWorld, shrunk, timeline

    for violation in violations:
        print(violation)
    smallest = _quietly(functools.partial(shrunk, schedule))
    world = FaultWorld(smallest)
    _quietly(world.run)
    print(f"schedule: {smallest}")
    print(timeline(world))


def _quietly(work: Callable[[], Result]) -> Result:
    """Call `work` without the warnings of learners, which log every peer that they lose."""
    log = logging.getLogger("roundelay")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return work()
    finally:
        log.setLevel(before)


def _print(result: dict[str, Any], folder: Path) -> None:
    disturbed, undisturbed = result["disturbed"], result["undisturbed"]
    for event in disturbed["events"]:
        learner = "" if event["learner"] is None else f" learner {event['learner']}"
        stalled = f"; the others stalled for {event['stalled_s']:.1f} s" if "stalled_s" in event else ""
        if event.get("pace_after") is not None:
            stalled += f", then had {event['pace_after']:.0%} of their pace"
        seconds = f" within {event['seconds']:.2f} s" if "seconds" in event else ""
        print(f"{event['elapsed_s']:8.1f} s  {event['event']}{learner}{seconds}{stalled}  {event['reason']}")
    print(f"{'':24}{'undisturbed':>14}{'with faults':>14}")
    for name, value in _figures(undisturbed).items():
        print(f"{name:24}{value:>14}{_figures(disturbed)[name]:>14}")
    if found := result.get("campaign"):
        lost_s = found["lost_s"]
        print(f"campaign: {found['injected']} of {found['planned']} faults injected, {found['survived'] or 0} survived")
        print(f"seconds lost per fault: {lost_s['median']} (median), {lost_s['p99']} (99 %)")
    print(f"both runs: {folder}")


def _figures(outcome: dict[str, Any]) -> dict[str, str]:
    chunks = outcome["chunks"]
    losses = {f"{split} loss": (outcome[split] or {}).get("loss") for split in ("valid", "test")}
    return {
        "finished": "yes" if outcome["finished"] else "no",
        "seconds": "-" if outcome["elapsed_s"] is None else f"{outcome['elapsed_s']:.1f}",
        **{name: "-" if loss is None else f"{loss:.4f}" for name, loss in losses.items()},
        "chunks used once": f"{chunks['once']:,}",
        "chunks used more often": f"{chunks['more_than_once']:,}",
        "chunks never used": f"{chunks['never']:,}",
        "imbalance of the sum": f"{outcome['conservation']['relative']:.1e}",
    }

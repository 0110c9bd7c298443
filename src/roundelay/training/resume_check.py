"""Whether a run can go on from its checkpoint with a changed configuration. Nothing is changed here."""

from __future__ import annotations

from pathlib import Path

from roundelay.errors import ConfigError
from roundelay.training.checkpoint import Checkpoint, folder_name, pieces
from roundelay.training.config import Config
from roundelay.training.recipes import task_of
from roundelay.training.state import State, epochs_done
from roundelay.weights.serialization import read_state


def check_resume_here(before: Config, after: Config, folder: Path) -> None:
    """Like `check_resume`, with the newest files that this machine has: other machines may have more of that checkpoint."""
    found = pieces(folder)
    newest = max(found, default=0)
    files = {learner: (piece["file"], piece["sha256"]) for learner, piece in found.get(newest, {}).items()}
    check_resume(before, after, Checkpoint(folder / folder_name(newest), newest, files))


def check_resume(before: Config, after: Config, checkpoint: Checkpoint) -> None:
    """Check that the state in `checkpoint`, of a run with the configuration `before`, fits the configuration `after`.

    Raises ConfigError if it does not.
    """
    for key, old, new in [
        ("task", before.task, after.task),
        ("strategy", before.strategy, after.strategy),
        ("optimizer.name", before.optimizer.name, after.optimizer.name),
    ]:
        if old != new:
            raise ConfigError(f"the run has {key} {old}, and its checkpoints have no state for {new}; {_ADVICE}")
    smaller, other_settings = after.budget.epochs < before.budget.epochs, before.settings != after.settings
    if not checkpoint.files or (not smaller and not other_settings):
        return
    states = [read_state(checkpoint.path(learner)) for learner in sorted(checkpoint.files)]
    done = epochs_done(states)
    if done > after.budget.epochs:
        raise ConfigError(
            f"the run has done {done:.4g} epochs, more than {after.budget.epochs:g}; set budget.epochs to at least {done:.4g}"
        )
    if other_settings:
        _check_shapes(after, states[0])


_ADVICE = "go on without this change, or begin a new run with another --out"


def _check_shapes(config: Config, state: State) -> None:
    """Raise ConfigError unless the model of `config` has the weights of `state`."""
    new = {name: tuple(each.shape) for name, each in task_of(config).module().state_dict().items()}
    old = {name: tuple(each.shape) for name, each in state["module"].items()}
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"settings give a model whose weight '{name}' has shape {new.get(name, 'none')}, and the checkpoint has "
                f"{old.get(name, 'none')}; {_ADVICE}"
            )

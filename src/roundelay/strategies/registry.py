"""Strategies by name or by `module:Class`, for configurations and the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from roundelay import plugins
from roundelay.errors import StrategyError, unknown
from roundelay.strategies.adpsgd import ADPSGD
from roundelay.strategies.allreduce import Allreduce
from roundelay.strategies.base import Strategy
from roundelay.strategies.delay_by_one import DelayByOne
from roundelay.strategies.dpsgd import DPSGD
from roundelay.strategies.local_sgd import LocalSGD

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "adpsgd": ADPSGD,
    "dpsgd": DPSGD,
    "allreduce": Allreduce,
    "delay-by-one": DelayByOne,
    "delay-by-one-gradients": functools.partial(DelayByOne, delayed="gradients"),
    "local-sgd": LocalSGD,
}


def strategy_named(name: str, **options: Any) -> Strategy:  # noqa: ANN401  # each strategy has its own
    """The strategy called `name`, or `module:Class`, with the options that it takes; other options are ignored.

    Raises StrategyError for an unknown name, or a class that is no Strategy.

    >>> strategy_named("dpsgd", topology="ring", max_lead=4)
    <roundelay.strategies.dpsgd.DPSGD object at ...>
    """
    factory = _factory(name)
    parameters = inspect.signature(factory).parameters
    taken = {option: value for option, value in options.items() if option in parameters}
    try:
        inspect.signature(factory).bind(**taken)
    except TypeError as error:
        raise StrategyError(
            f"'{name}' cannot be made by its name: {error}; give its arguments defaults, or use it from Python"
        ) from None
    return factory(**taken)


def takes_option(name: str, option: str) -> bool:
    """Whether the strategy called `name`, or `module:Class`, has this option. Raises StrategyError as `strategy_named`.

    >>> takes_option("dpsgd", "topology"), takes_option("allreduce", "topology")
    (True, False)
    """
    return option in inspect.signature(_factory(name)).parameters


def _factory(name: str) -> Callable[..., Strategy]:
    if plugins.is_path(name):
        return _from_plugin(name)
    if name not in STRATEGIES:
        raise StrategyError(unknown("strategy", name, STRATEGIES) + "; or a class as module:Class")
    return STRATEGIES[name]


def _from_plugin(path: str) -> Callable[..., Strategy]:
    found = plugins.load(path, "strategy", StrategyError)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise StrategyError(f"'{path}' is no strategy; it must be a class derived from roundelay.Strategy")
    return cast(Callable[..., Strategy], found)

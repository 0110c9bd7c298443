"""Strategies by name, and what they say of themselves."""

import pytest

from roundelay.errors import StrategyError
from roundelay.strategies import ADPSGD, DPSGD, SuperLearner
from roundelay.strategies.registry import STRATEGIES, strategy_named


def test_a_strategy_takes_those_options_that_it_has():
    strategy = strategy_named("adpsgd", topology="ring", max_lead=3, wire="bfloat16")
    assert isinstance(strategy, ADPSGD)
    assert (strategy.max_lead, strategy.wire) == (3, "bfloat16")
    assert isinstance(strategy_named("dpsgd", topology="ring", max_lead=3, wire=None), DPSGD)


def test_a_class_path_is_as_good_as_a_name(tmp_path, monkeypatch):
    source = "import roundelay\n"
    source += "class Lazy(roundelay.Strategy):\n    def __init__(self, max_lead):\n        self.lead = max_lead\n"
    (tmp_path / "own_strategies.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert strategy_named("own_strategies:Lazy", topology="ring", max_lead=7).lead == 7


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adsgd", "unknown strategy 'adsgd'; did you mean 'adpsgd'"),
        ("math:pi", "'math:pi' is no strategy"),
        ("no_such_module:Strategy", "cannot import the strategy"),
    ],
)
def test_what_is_no_strategy_is_refused_with_what_is_allowed(name, words):
    with pytest.raises(StrategyError, match=words):
        strategy_named(name)


def test_what_strategies_say_of_themselves():
    strategies = {name: strategy_named(name) for name in STRATEGIES}
    assert [name for name, each in strategies.items() if not each.synchronous] == ["adpsgd", "local-sgd"]
    assert [name for name, each in strategies.items() if each.reforms_alone] == ["adpsgd", "local-sgd"]
    assert [name for name, each in strategies.items() if not each.uses_collectives] == ["adpsgd", "local-sgd"]
    assert [name for name, each in strategies.items() if each.needs_equal_weights] == [
        "allreduce",
        "delay-by-one-gradients",
    ]
    assert [name for name, each in strategies.items() if not each.takes_groups] == [
        "allreduce",
        "delay-by-one-gradients",
    ]
    assert SuperLearner(ADPSGD(), 2).uses_collectives
    assert SuperLearner(ADPSGD(), 2).reforms_alone
    assert not SuperLearner(DPSGD(), 2).reforms_alone


def test_a_class_with_an_argument_that_no_option_gives_is_refused_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "own_strategy.py").write_text(
        "import roundelay\nclass Own(roundelay.Strategy):\n    def __init__(self, pace): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        StrategyError, match=r"'own_strategy:Own' cannot be made by its name: .*'pace'; give its arguments"
    ):
        strategy_named("own_strategy:Own", topology="ring")

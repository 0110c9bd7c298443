"""Lightning: `Trainer(strategy="roundelay_adpsgd", devices=4)`. Importing this package registers the strategies."""

from roundelay.errors import MissingExtraError

try:
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError as error:
    raise MissingExtraError("training with Lightning", "lightning") from error

from roundelay.integrations.lightning.strategy import NAMES, RoundelayStrategy

RoundelayStrategy.register_strategies(StrategyRegistry)

__all__ = ["NAMES", "RoundelayStrategy"]

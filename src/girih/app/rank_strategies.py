"""Estimates one config under every strategy.

Returns predicted speeds, reasons for refusals, and the strategy to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.simulator.prediction import Prediction
from girih.strategies import BY_NAME
from girih.strategies.strategy import Strategy, price

LEAST_TRAINERS = 2
NEAR = 0.95
"""A strategy with at least this fraction of the best predicted speed counts as equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """A strategy, with its estimate.

    Attributes:
        strategy: the strategy with its options.
        is_configured: True if the config names this strategy.
        prediction: the predicted speed. None if the strategy is refused or has no prediction.
        refused: the reason why there is no prediction, or "".
    """

    strategy: Strategy
    is_configured: bool
    prediction: Prediction | None
    refused: str = ""

    @property
    def label(self) -> str:
        """The name, with options that differ from their defaults."""
        options = options_of(self.strategy)
        return f"{self.strategy.name} ({options})" if options else self.strategy.name

    @property
    def processes(self) -> int:
        """The number of processes that the strategy starts."""
        return self.strategy.trainers + sum(self.strategy.roles.values())

    @property
    def samples_per_s(self) -> float:
        """The predicted speed; 0 if there is no prediction."""
        return 0.0 if self.prediction is None else self.prediction.samples_per_s


def offers(configured: Strategy, facts_of: Callable[[Strategy], Facts]) -> tuple[StrategyEstimate, ...]:
    """Estimates the configured strategy, then all other strategies.

    These have the same number of trainers, but at least two.

    Args:
        facts_of: a strategy → the facts for its number of trainers, with all inputs of a prediction.
    """
    count = max(LEAST_TRAINERS, configured.trainers)
    others = [variant for kind in BY_NAME.values() for variant in kind.with_trainers(count)]
    estimates = []
    for strategy in (configured, *(other for other in others if other != configured)):
        prediction, refused = (
            None,
            "its speed is not predicted: on GPUs, compiled, or a strategy without step_graph",
        )
        try:
            facts = facts_of(strategy)
            strategy.plan(facts)
            prediction = price(strategy, facts)
        except ConfigError as error:
            refused = str(error)
        estimate = StrategyEstimate(
            strategy=strategy,
            is_configured=strategy is configured,
            prediction=prediction,
            refused="" if prediction else refused,
        )
        estimates.append(estimate)
    return tuple(estimates)


def choose(estimates: Sequence[StrategyEstimate]) -> tuple[StrategyEstimate | None, str]:
    """Returns the estimate to use, and the reason. Returns None if no speeds are known.

    The choice is the strategy with the fewest processes among those within 5 % of the fastest.
    """
    priced = [estimate for estimate in estimates if estimate.prediction is not None]
    if not priced:
        return None, "no speed is predicted for any strategy"
    fastest = max(priced, key=lambda offer: offer.samples_per_s)
    near = [offer for offer in priced if offer.samples_per_s >= NEAR * fastest.samples_per_s]
    best = min(near, key=lambda offer: (offer.processes, -offer.samples_per_s))
    bound = "" if best.prediction is None else best.prediction.bound
    if best is fastest:
        return best, f"it is predicted to be the fastest, bounded by {bound}"
    return best, (
        f"it is predicted to be within {1 - NEAR:.0%} of the fastest, {fastest.label}, with {best.processes} processes instead of"
        f" {fastest.processes}; bounded by {bound}"
    )


def options_of(strategy: Strategy) -> str:
    """Returns options that differ from their defaults, written as in ``[strategy]``."""
    options: Sequence[Field[object]] = fields(strategy) if is_dataclass(strategy) else ()
    values = {option.name: (getattr(strategy, option.name), option.default) for option in options}
    return ", ".join(f"{name} = {value!r}" for name, (value, default) in values.items() if value != default)

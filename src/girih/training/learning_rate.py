"""One learning rate schedule for both halves: torch changes the dense rate, and the sparse rates follow in proportion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.nn import Parameter

from girih import config
from girih.config.train import direction
from girih.dense.options import schedule_class
from girih.errors import CheckpointError, ConfigError
from girih.metrics import LabelMetrics

WHERE = "lr_schedule"
"""The name of the option in messages."""


class LearningRate:
    """A scheduler of ``torch.optim.lr_scheduler`` over the dense optimizer.

    Args:
        optimizer: the dense optimizer. A model without parameters uses a substitute optimizer for the schedule.
        options: torch's own options and two more, for example ``{"name": "StepLR", "step_size": 8, "gamma": 0.1}``.
            ``interval`` is "epoch" or "step", the interval between steps of the schedule. ``metric`` is for
            ``ReduceLROnPlateau``, which steps at each evaluation. A built-in metric determines its ``mode``. None keeps
            the rate.

    Raises:
        ConfigError: the scheduler or an option is unknown, or torch refuses a value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, options: Mapping[str, object] | None) -> None:
        if optimizer is None:
            optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=1.0)
        self._optimizer = optimizer
        self._base_lr = float(optimizer.param_groups[0]["lr"])
        self._scheduler: Any = None  # an LRScheduler; the signature of step() depends on the class
        self._name: str | None = None
        self.interval = "epoch"
        self.metric: str | None = None
        if options is None:
            return
        options = dict(options)
        if "name" not in options:
            raise ConfigError(f"{WHERE}: key 'name' is missing, for example name = \"StepLR\"")
        cls = schedule_class(str(options.pop("name")), WHERE)
        if cls is torch.optim.lr_scheduler.ReduceLROnPlateau:
            self.metric = str(options.pop("metric", "auc"))
            better = direction(self.metric, options.get("mode"), WHERE)
            options.setdefault("mode", "max" if better > 0 else "min")
        else:
            self.interval = str(options.pop("interval", "epoch"))
            config.build(Literal["epoch", "step"], self.interval, f"{WHERE}: interval")
        if "last_epoch" in options:
            raise ConfigError(
                f"{WHERE}: option 'last_epoch' is not needed, because --resume restores it; drop it"
            )
        checked = config.check_call(cls, options, WHERE)
        try:
            self._try_out(cls, checked)
            self._scheduler, self._name = cls(self._optimizer, **checked), cls.__name__
        except ConfigError as error:
            raise ConfigError(f"{WHERE}: {error}") from None
        except Exception as error:
            raise ConfigError(f"{WHERE}: torch refuses these options: {_reason(error)}") from None

    def _try_out(self, cls: Callable[..., object], options: Mapping[str, object]) -> None:
        """Takes one step with a substitute optimizer, because torch checks some values only in a step."""
        if not type(self._optimizer).__module__.startswith(("torch.optim", "girih.")):
            return
        groups = [{**group, "params": [Parameter(torch.zeros(1))]} for group in self._optimizer.param_groups]
        kind: Callable[..., torch.optim.Optimizer] = type(self._optimizer)
        stand_in = kind(groups)
        scheduler: Any = cls(stand_in, **options)
        stand_in.step()
        scheduler.step() if self.metric is None else scheduler.step(0.5)
        _check_rate(float(stand_in.param_groups[0]["lr"]))

    def scale(self) -> float:
        """The factor for sparse rates: the current dense rate divided by the first."""
        if self._base_lr == 0.0:
            return 1.0
        return float(self._optimizer.param_groups[0]["lr"]) / self._base_lr

    def after(self, interval: Literal["epoch", "step"]) -> None:
        """Steps a schedule that counts steps or epochs."""
        if self.metric is None and self.interval == interval:
            self._move()

    def after_evaluation(self, metrics: LabelMetrics) -> None:
        """Steps a schedule that depends on a metric."""
        value = metrics.value(self.metric) if self.metric else None
        if value is not None:
            self._move(value)

    def _move(self, *metric: float) -> None:
        if self._scheduler is None:
            return
        group = self._optimizer.param_groups[0]
        before = group["lr"]
        try:
            self._scheduler.step(*metric)
            _check_rate(float(group["lr"]))
        except (ArithmeticError, ValueError) as error:
            group["lr"] = before
            raise ConfigError(f"{WHERE}: {self._name}: {_reason(error)}") from None

    def state(self) -> dict[str, object]:
        """Returns the state for a checkpoint."""
        scheduler = {} if self._scheduler is None else self._scheduler.state_dict()
        return {
            "base_lr": self._base_lr,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups],
            "name": self._name,
            "scheduler": scheduler,
        }

    def check(self, state: Mapping[str, object]) -> None:
        """Refuses a state that :meth:`restore` cannot continue from.

        Raises:
            CheckpointError: the state belongs to another schedule, or to a schedule with another first rate.
        """
        if state["scheduler"] and state["name"] != self._name:
            raise CheckpointError(
                f"{WHERE}: the checkpoint has {state['name']}, but the configuration has {self._name}; "
                "resume with the schedule of the checkpoint, or start a new run"
            )
        if state["scheduler"] and state["base_lr"] != self._base_lr:
            raise CheckpointError(
                f"{WHERE}: the dense rate began at {state['base_lr']:g}, but the configuration has {self._base_lr:g}; "
                "a schedule does not allow this change: resume with the first rate, or start a new run"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a :meth:`state`. If the checkpoint has no schedule, the schedule begins now.

        Without a schedule, the configured rate applies. It may differ from the rate of the checkpoint.

        Raises:
            CheckpointError: see :meth:`check`.
        """
        self.check(state)
        if not state["scheduler"]:
            return
        for group, options in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
        self._scheduler.load_state_dict(state["scheduler"])


def _check_rate(rate: float) -> None:
    most = torch.finfo(torch.float32).max
    if not 0.0 <= rate <= most:
        raise ConfigError(f"the learning rate becomes {rate:g}; expected a number from 0 to {most:.3g}")


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {text}"

"""One learning rate schedule for both halves: torch moves the dense rate, the sparse rates follow in proportion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from girih import config
from girih.dense.options import schedule_class
from girih.errors import ConfigError
from girih.metrics import DIRECTIONS, LabelMetrics


class LearningRate:
    """A scheduler of ``torch.optim.lr_scheduler`` over the dense optimizer.

    Args:
        optimizer: the dense one; without one (a model without parameters) a stand-in carries the schedule.
        options: ``{"name": "StepLR", "step_size": 8, "gamma": 0.1}``: torch's own options, and
            ``interval`` ("epoch" or "step", when to step) and ``metric`` (for ``ReduceLROnPlateau``, which
            steps at each evaluation; its ``mode`` follows from the metric). None keeps the rate.

    Raises:
        ConfigError: an unknown scheduler or option, or a value that torch refuses.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        options: Mapping[str, Any] | None,
        where: str = "lr_schedule",
    ) -> None:
        if optimizer is None:
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self._optimizer = optimizer
        self._base_lr = float(optimizer.param_groups[0]["lr"])
        self._scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self.interval = "epoch"
        self.metric: str | None = None
        if options is not None:
            self._make(dict(options), where)

    def _make(self, options: dict[str, Any], where: str) -> None:
        if "name" not in options:
            raise ConfigError(f"{where}: key 'name' is missing, as in name = \"StepLR\"")
        cls = schedule_class(str(options.pop("name")), where)
        if cls is torch.optim.lr_scheduler.ReduceLROnPlateau:
            self.metric = str(options.pop("metric", "auc"))
            if self.metric not in DIRECTIONS:
                raise ConfigError(
                    f"{where}: metric = {self.metric!r}: expected one of {', '.join(DIRECTIONS)}"
                )
            mode = "max" if DIRECTIONS[self.metric] > 0 else "min"
            if options.setdefault("mode", mode) != mode:
                raise ConfigError(
                    f"{where}: mode = {options['mode']!r}, but {self.metric} is better when {mode}imal"
                )
        else:
            self.interval = str(options.pop("interval", "epoch"))
            if self.interval not in ("epoch", "step"):
                raise ConfigError(f"{where}: interval = {self.interval!r}: expected 'epoch' or 'step'")
        checked = config.check_call(cls, options, where)
        try:
            self._scheduler = cls(self._optimizer, **checked)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: torch refuses these options: {error}") from None

    def scale(self) -> float:
        """Today's dense rate over the first: what multiplies the sparse rates."""
        if self._base_lr == 0.0:
            return 1.0
        return float(self._optimizer.param_groups[0]["lr"]) / self._base_lr

    def after_step(self) -> None:
        """Moves a schedule that counts steps."""
        if self._scheduler is not None and self.metric is None and self.interval == "step":
            self._scheduler.step()

    def after_epoch(self) -> None:
        """Moves a schedule that counts epochs."""
        if self._scheduler is not None and self.metric is None and self.interval == "epoch":
            self._scheduler.step()

    def after_evaluation(self, metrics: LabelMetrics) -> None:
        """Moves a schedule that watches a metric."""
        if self._scheduler is not None and self.metric is not None:
            value = getattr(metrics, self.metric)
            if value is not None:
                self._scheduler.step(value)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        scheduler = {} if self._scheduler is None else self._scheduler.state_dict()
        return {"base_lr": self._base_lr, "lr": self._optimizer.param_groups[0]["lr"], "scheduler": scheduler}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`; the rates themselves come back with the dense optimizer's state."""
        self._base_lr = state["base_lr"]
        self._optimizer.param_groups[0]["lr"] = state["lr"]
        if self._scheduler is not None and state["scheduler"]:
            self._scheduler.load_state_dict(state["scheduler"])

"""Options of a training run: ``[train]``, ``[metrics]`` and ``[schedule]`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from girih.config.bounds import Bounds, Count, NonNegative, Positive
from girih.config.options import Options
from girih.config.user_code import load_object
from girih.errors import ConfigError, nearest

DIRECTIONS = dict.fromkeys(("auc", "auprc", "gauc", "uauc"), 1)
DIRECTIONS |= dict.fromkeys(("logloss", "normalized_entropy", "mae", "rmse"), -1)
"""Metrics that every evaluation computes if they are defined: 1 if more is better, -1 if less is."""
RECORDED = {*DIRECTIONS, "calibration", "num_examples", "step", "examples", "epoch", "split"}
"""Names in records of evaluations. The others are metrics that only some runs have."""

Steps = Annotated[int, Bounds(0)]


class EarlyStopping(Options):
    """Ends training when ``metric`` on the validation data has not improved ``patience`` + 1 times in a row.

    The best weights become the final ones.

    Attributes:
        metric: auc, auprc, gauc, uauc, logloss, normalized_entropy, mae or rmse, ``recall@k``, ``ndcg@k`` or ``mrr`` with the k of ``rank_at``, or one of ``metrics``.
        mode: "max" if more is better, "min" if less is. Only for your own metric.
        patience: number of evaluations without an improvement that training survives.
        min_delta: the difference from the best value that counts as an improvement, at least 0.

    Examples:
        >>> import girih
        >>> stopping = girih.EarlyStopping(metric="logloss", patience=2, min_delta=1e-4)
        >>> options = girih.TrainOptions(epochs=20, early_stopping=stopping)
        >>> options.needs_valid
        'early_stopping'
    """

    owner = "early_stopping: "

    metric: str = "auc"
    mode: Literal["min", "max"] | None = None
    patience: Steps = 0
    min_delta: NonNegative = 0.0


class TrainOptions(Options):
    """Options of training.

    Attributes:
        epochs: number of passes over the training data.
        max_steps: ends the run after this number of steps, regardless of the epoch; None means no limit.
        seed: seed of initial rows. In a config also of shuffling and of the model's initial values.
        precision: "bfloat16" computes the dense half under autocast; parameters stay float32.
        dense_forward: "int8" computes the forward pass of linear layers with 8-bit integers, on CPUs; parameters, and the
            whole backward pass, stay float32 (HT §5.1).
        device: device of the dense half: "cpu", "cuda" or "auto" (CUDA if available).
        clip_norm: maximum L2 norm of all dense gradients together; None clips nothing. Gradients of rows are not clipped.
        global_batch_norm: batch norm uses the moments of all trainers' examples in a step, not only this trainer's.
        compile: uses ``torch.compile`` for training steps of the dense half, but not for evaluations.
        early_stopping: ends training early, see :class:`EarlyStopping`; None trains all epochs.
        on_nonfinite: "stop" ends the run at a NaN or infinite loss or gradient; "skip" refuses the whole step
            (neither half moves) and counts it.
        lr_schedule: a scheduler of ``torch.optim.lr_scheduler`` by name with its options.
        evaluate_every_steps: evaluates at this interval too, in steps, not only at the end of an epoch.
        log_every_steps: steps per line of ``metrics.jsonl``; None: often at first, so that a short run has about twenty
            lines, later every 50 steps.
        gauc_by: a categorical feature whose ids group the examples for GAUC.
        rank_at: the ks of recall@k and NDCG@k, within the groups of ``gauc_by``; adds MRR.
        metrics: your own metrics, as ``"file.py:function"`` or ``"package.module:function"``; from Python also functions.
        progressive_validation: scores each batch in its forward pass, before its update.
        tensorboard: writes scalars for TensorBoard into the run directory.

    Examples:
        >>> import girih
        >>> options = girih.TrainOptions(
        ...     epochs=3, precision="bfloat16", gauc_by="user", rank_at=[10]
        ... )
        >>> options.epochs, options.rank_at
        (3, (10,))
        >>> girih.TrainOptions(epoch=3)
        Traceback (most recent call last):
            ...
        girih.errors.ConfigError: TrainOptions: unknown option 'epoch'; did you mean 'epochs'?
    """

    owner = "train: "

    epochs: Steps = 1
    max_steps: Count | None = None
    seed: Annotated[int, Bounds(0, (1 << 63) - 1)] = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    dense_forward: Literal["float32", "int8"] = "float32"
    device: str = "auto"
    clip_norm: Positive | None = None
    global_batch_norm: bool = False
    compile: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    early_stopping: EarlyStopping | None = None
    lr_schedule: Mapping[str, Any] | None = None
    evaluate_every_steps: Count | None = None
    log_every_steps: Count | None = None
    gauc_by: str | None = None
    rank_at: tuple[Count, ...] = ()
    metrics: tuple[Any, ...] = ()
    progressive_validation: bool = False
    tensorboard: bool = False

    def _check(self) -> None:
        if self.dense_forward == "int8" and self.precision != "float32":
            raise ConfigError(
                f"dense_forward = 'int8' with precision = {self.precision!r}: expected precision = 'float32', which the"
                " rest of the network needs; or leave dense_forward out"
            )
        if self.dense_forward == "int8" and self.compile:
            raise ConfigError(
                "dense_forward = 'int8' with compile = true: compiled layers use their own matrix products; drop one of the two"
            )
        if self.compile and self.global_batch_norm:
            raise ConfigError(
                "train: compile = true: with global_batch_norm, trainers exchange moments within the forward pass,"
                " which cannot be compiled; drop one of the two"
            )
        if self.rank_at and self.gauc_by is None:
            raise ConfigError("train: rank_at needs gauc_by, the feature that groups examples")
        if len(set(self.metric_names)) < len(self.metrics):
            raise ConfigError(f"train: metrics: {', '.join(self.metric_names)}: expected different names")
        for name, metric in self.watched.items():
            self._check_metric(name, metric)
        if self.early_stopping is not None:
            direction(self.early_stopping.metric, self.early_stopping.mode, "early_stopping")

    def _check_metric(self, where: str, metric: str) -> None:
        """Refuses a metric that no evaluation computes."""
        ranked = [f"{kind}@{k}" for kind in ("recall", "ndcg") for k in self.rank_at]
        known = [*DIRECTIONS, *ranked, *(["mrr"] if self.rank_at else []), *self.metric_names]
        if metric in ("gauc", "uauc") and self.gauc_by is None:
            raise ConfigError(f"{where}: metric = {metric!r} needs gauc_by, the feature that groups examples")
        if metric not in known:
            hint = nearest(metric, known)
            if metric == "mrr" or metric.startswith(("recall@", "ndcg@")):
                hint = "; rank_at lists the ks to compute, and gauc_by names the feature that groups examples"
            raise ConfigError(f"{where}: metric = {metric!r}: expected one of {', '.join(known)}{hint}")

    @property
    def metric_names(self) -> list[str]:
        """The names of ``metrics``, in order."""
        return [metric_name(metric) for metric in self.metrics]

    def with_functions(self, where: str = "options", directory: Path | None = None) -> TrainOptions:
        """Returns a copy in which all ``metrics`` are functions: imports those given by name.

        Args:
            where: names the options in errors.
            directory: the base of relative paths; None takes the working directory.

        Raises:
            ConfigError: the file, module or function does not exist, or a file fails to load.
        """
        where, functions = f"{where}: train.metrics", list(self.metrics)
        for place, metric in enumerate(self.metrics):
            if isinstance(metric, str):  # without this, the function may have another name
                functions[place] = partial(
                    load_object(metric, where, directory, accepts=callable, expected="a function")
                )
                vars(functions[place])["__name__"] = metric_name(metric)
        return replace(self, metrics=tuple(functions))

    @property
    def watched(self) -> dict[str, str]:
        """Option → the metric of the first label that it uses."""
        watched = {} if self.early_stopping is None else {"early_stopping": self.early_stopping.metric}
        if self.lr_schedule is not None and self.lr_schedule.get("name") == "ReduceLROnPlateau":
            watched["lr_schedule"] = str(self.lr_schedule.get("metric", "auc"))
        return watched

    @property
    def needs_valid(self) -> str | None:
        """The option that has no effect without validation data, if there is one."""
        name = next(iter(self.watched), None if self.evaluate_every_steps is None else "evaluate_every_steps")
        return "lr_schedule ReduceLROnPlateau" if name == "lr_schedule" else name


def metric_name(metric: object) -> str:
    """Returns the name of a user's own metric: that of its function.

    Raises:
        ConfigError: not a function, or girih uses its name.
    """
    text = metric if isinstance(metric, str) else f":{getattr(metric, '__name__', '')}"
    name = Path(text).name.partition(":")[2]
    if not name.isidentifier() or name in {*RECORDED, "mrr"}:
        raise ConfigError(
            f"train: metrics: {metric!r}: expected path/to/file.py:function, package.module:function, or from Python a function; names other than girih's: mrr, {', '.join(sorted(RECORDED))}"
        )
    return name


def direction(metric: str, mode: object, where: str) -> int:
    """Returns 1 if more of a metric is better, -1 if less is.

    Args:
        mode: "max", "min", or None for a built-in metric.
        where: names the option that watches the metric, in errors.

    Raises:
        ConfigError: a mode that contradicts a built-in metric, or no mode for a user's own metric.
    """
    built_in = DIRECTIONS.get(metric, 1 if "@" in metric or metric == "mrr" else 0)
    sign = {"max": 1, "min": -1}.get(str(mode), built_in)
    if sign == -built_in:
        reason = ("your own: set mode to 'max' or 'min'", "better when maximal", "better when minimal")[
            built_in
        ]
        raise ConfigError(f"{where}: mode = {mode!r}, but {metric} is {reason}")
    return sign


class MetricsOptions(Options):
    """Options of metrics for Prometheus. Each process of a run serves them on its own port.

    Attributes:
        port: each process takes the first free port from this one on; 0 takes any; None serves none.
        bind: the address of this host to serve at. There is no authentication: anyone who reaches it can read the metrics.
        targets: directory for files that list the addresses, for Prometheus's ``file_sd_configs``; None means ``targets`` in
            the run directory.
    """

    owner = "metrics: "

    port: Annotated[int, Bounds(0, 65_535)] | None = None
    bind: str = "127.0.0.1"
    targets: str | None = None

    def _check(self) -> None:
        if not self.bind or self.bind in ("*", "0.0.0.0", "::"):
            raise ConfigError(
                f"metrics: bind = {self.bind!r}: expected one address of this host, for example 127.0.0.1"
            )
        if self.targets == "":
            raise ConfigError("metrics: targets = '': expected a directory")

    def below(self, directory: Path) -> MetricsOptions:
        """Returns the options with absolute paths; relative ones start at ``directory``."""
        return self if self.targets is None else replace(self, targets=str(directory / self.targets))


class ScheduleOptions(Options):
    """Packing, interleaving and prefetching. They change the order of work, not the results.

    Attributes:
        packing: tables of equal row layout share one operation (D-packing, PICASSO §III-B); False: one operation per table.
        micro_batches: number of parts into which each batch is cut (D-interleaving, PICASSO §III-C); "auto" by Eq. 2.
        micro_batches_from: the layer from which batches are cut: "embedding", or "mlp", which only reduces the memory of
            activations.
        interleaving_groups: number of sets of embedding groups that follow each other (K-interleaving, PICASSO §III-C);
            "auto" by Eq. 3.
        excluded: features whose embedding groups run before the interleaving groups.
        prefetch: prepares the ids of the next batch while this batch is computed.

    Examples:
        >>> import girih
        >>> schedule = girih.ScheduleOptions(micro_batches=4, micro_batches_from="mlp")
        >>> schedule.micro_batches, schedule.packing
        (4, True)
    """

    owner = "schedule: "

    packing: bool = True
    micro_batches: Count | Literal["auto"] = 1
    micro_batches_from: Literal["embedding", "mlp"] = "embedding"
    interleaving_groups: Count | Literal["auto"] = 1
    excluded: tuple[str, ...] = ()
    prefetch: bool = True

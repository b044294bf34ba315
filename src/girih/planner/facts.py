"""Facts: the things that are known before a run. Frozen, plain values; a plan is a function of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from girih.config.train import ScheduleOptions
from girih.planner.calibration import Calibration, Links
from girih.planner.operators import OperatorGraph, Tagging
from girih.planner.traffic import NOMINAL, Speeds
from girih.schema import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """One substitutable operator of a model (DES, Algorithm 1).

    Attributes:
        aggregation: "sum" or "concat".
        columns: numbers per example to aggregate.
        colocated_features: features that must be on the same trainer.
    """

    name: str
    aggregation: str
    columns: int
    colocated_features: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The properties of a model that planning needs.

    Attributes:
        name: the name of its class.
        num_parameters: numbers of the dense half.
        upper_parameters: parameters that belong to no operator's features, so that each trainer has them.
        upper_weights: the part of the upper parameters that is in matrix products.
        last_bucket: the number of parameters in the bucket of gradients that is sent last. None: all parameters.
        operators: substitutable operators, in the order of declaration.
        not_substitutable: the reason why the model cannot be substituted, if it gives one.
        optimizer: class of the dense optimizer, with its module. Empty without parameters.
        loss_strategies: strategies that the model's own loss supports; None supports all.
    """

    name: str
    num_parameters: int
    upper_parameters: int = 0
    upper_weights: int = 0
    last_bucket: int | None = None
    operators: tuple[OperatorFacts, ...] = ()
    not_substitutable: str | None = None
    optimizer: str = ""
    loss_strategies: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessProfile:
    """Rows and ids that a training step touches: means over several batches.

    Attributes:
        rows: table → unique keys of a whole batch. rows_of_share: those of one trainer's share.
        widths: table → numbers per row, first-order weights included.
        ids: ids of a whole batch. ids_of_tables: table → its part of them.
    """

    rows: Mapping[str, float]
    rows_of_share: Mapping[str, float]
    widths: Mapping[str, int]
    ids: float = 0.0
    ids_of_tables: Mapping[str, float] = field(default_factory=dict)

    def loads(self) -> dict[str, float]:
        """Returns table → rows per step × numbers per row: the cost for its owner."""
        return {name: rows * self.widths[name] for name, rows in self.rows.items()}

    @property
    def keys_of_share(self) -> float:
        """Returns the unique keys of one trainer's share, over all tables."""
        return sum(self.rows_of_share.values())

    @property
    def numbers_of_share(self) -> float:
        """Returns the numbers in the rows of these keys."""
        return sum(count * self.widths[name] for name, count in self.rows_of_share.items())


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Memory and time of the model's forward and backward pass.

    Attributes:
        bytes_per_example: bytes that the forward pass keeps for the backward pass.
        memory_bytes: bytes that a trainer may use.
        pass_s: seconds per pass, forward and backward, without examples. example_s: seconds per example.
        update_s: seconds of a step of the optimizer.
        busy_threads: threads that a pass keeps busy on average, at most those it has. None: not measured; counts as
            all.
        parameter_copies: bytes per byte of parameters, with one gradient and the optimizer's state: 4 for Adam.
    """

    bytes_per_example: float
    memory_bytes: float
    pass_s: float = 0.0
    example_s: float = 0.0
    update_s: float = 0.0
    parameter_copies: float = 1.0
    busy_threads: float | None = None

    def seconds(self, examples: float) -> float:
        """Returns seconds of a forward and backward pass of a number of examples."""
        return self.pass_s + self.example_s * examples


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Tables of equal row layout, so that one operation can serve them.

    Attributes:
        dim: numbers per row, first-order weights included.
        output_vectors, output_numbers: vectors per example in the pooled outputs, and their numbers.
        optimizer: name of the optimizer of most columns of a row.
    """

    name: str
    tables: tuple[str, ...]
    dim: int
    output_vectors: int
    output_numbers: int
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """One table.

    Attributes:
        row_bytes: bytes of a row in memory, with its optimizer's state.
        max_rows: maximum number of rows; None means no limit.
    """

    name: str
    row_bytes: int
    max_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All inputs of a strategy's decisions.

    Attributes:
        num_trainers: number of trainers.
        hosts: the host of each trainer, by rank, equal for trainers on one host. Empty if unknown.
        batch_size: examples per step over all trainers, or None if no training data is known yet.
        device: device of the dense half. rows_on: requested device of rows, "cpu" or "gpu"; None lets the strategy
            choose.
        groups: tables by row layout, before a plan packs them.
        schedule: the options ``[schedule]``: packing and order of a step.
        global_batch_norm: whether batch norm uses the moments of all trainers' examples of a step.
        compile: whether torch compiles the dense half. clips: whether the norm of all dense gradients is bounded.
        profile: the access profile of the first batches, or None if unknown.
        speeds: nominal speeds, for decisions of plans.
        dense_cost: the cost of the model, or None if unknown. For plans, it has no measured times.
        links: calibrated links, to predict times; no decision depends on them.
        calibration: the calibration of the machine, to predict a speed.
        threads: number of threads that a trainer computes with.
        graph: the model's operators, if group servers may run some. tagging, wire: their devices, and the codecs of
            activations and dense gradients by kind, if a plan has decided these.
        tables: all tables with rows only in memory.
        free_bytes: free memory of this machine, or None if processes are on several hosts. It only decides refusals.
        memory_bytes: total memory of this machine.
    """

    schema: Schema
    model: ModelFacts
    groups: tuple[GroupFacts, ...]
    num_trainers: int
    seed: int
    hosts: tuple[str, ...] = ()
    batch_size: int | None = None
    device: str = "cpu"
    rows_on: str | None = None
    global_batch_norm: bool = False
    compile: bool = False
    clips: bool = False
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    profile: AccessProfile | None = None
    speeds: Speeds = NOMINAL
    dense_cost: DenseCost | None = None
    links: Links | None = None
    calibration: Calibration | None = None
    threads: int = 1
    graph: OperatorGraph | None = None
    tagging: Tagging | None = None
    wire: Mapping[str, str] | None = None
    tables: tuple[TableFacts, ...] = ()
    free_bytes: float | None = None
    memory_bytes: float | None = None

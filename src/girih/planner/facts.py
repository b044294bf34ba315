"""Facts are the things that are known before a run. They are frozen plain values, and a plan is a function of them."""

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
        num_parameters: number of parameters of the dense half.
        upper_parameters: number of parameters that do not belong to the features of an operator. Each trainer has a
            copy.
        upper_weights: the part of the upper parameters that is in matrix products.
        last_bucket: the number of parameters in the bucket of gradients that is sent last. None: all parameters.
        operators: substitutable operators, in the order of declaration.
        not_substitutable: the reason why the model does not work with ``substitution``, or None.
        optimizer: module and class of the dense optimizer. Empty if the model has no parameters.
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
        rows: table → unique keys of a whole batch. rows_of_share: table → unique keys of one trainer's share.
        widths: table → numbers per row, first-order weights included.
        ids: number of ids in a whole batch. ids_of_tables: table → its number of these ids.
    """

    rows: Mapping[str, float]
    rows_of_share: Mapping[str, float]
    widths: Mapping[str, int]
    ids: float = 0.0
    ids_of_tables: Mapping[str, float] = field(default_factory=dict)

    def loads(self) -> dict[str, float]:
        """Returns table → rows per step × numbers per row. This is the cost of a table for the trainer that owns it."""
        return {name: rows * self.widths[name] for name, rows in self.rows.items()}

    @property
    def keys_of_share(self) -> float:
        """Returns the unique keys of one trainer's share, over all tables."""
        return sum(self.rows_of_share.values())

    @property
    def numbers_of_share(self) -> float:
        """Returns how many numbers the rows of :meth:`keys_of_share` have in total."""
        return sum(count * self.widths[name] for name, count in self.rows_of_share.items())


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Memory and time of the model's forward and backward pass.

    Attributes:
        bytes_per_example: bytes per example that the forward pass keeps for the backward pass.
        memory_bytes: bytes that a trainer may use.
        pass_s: the fixed seconds of a forward and backward pass. example_s: the additional seconds per example.
        update_s: seconds of an update by the optimizer.
        busy_threads: average number of threads that a pass keeps busy. None if not measured. Then all threads count as
            busy.
        parameter_copies: memory for parameters, one gradient and optimizer state, divided by the memory for parameters.
            With Adam this is 4.
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
        schedule: the options ``[schedule]``, which decide the packing of tables and the order of a step.
        global_batch_norm: whether batch norm uses the moments of all trainers' examples of a step.
        compile: True if torch compiles the dense half. clips: True if the norm of all dense gradients is limited.
        profile: the access profile of the first batches, or None if unknown.
        speeds: nominal speeds, for decisions of plans.
        dense_cost: the cost of the model, or None if unknown. Plans use a cost without measured times.
        links: calibrated links. They predict times, but do not affect decisions.
        calibration: the calibration of the machine, to predict a speed.
        threads: number of threads that a trainer computes with.
        graph: the model's operators, if group servers may run some of them.
        tagging: the devices of the operators, if a plan has decided them.
        wire: the codecs of activations and dense gradients by kind, if a plan has decided them.
        tables: all tables whose rows are only in memory.
        free_bytes: free memory of this machine, or None if processes are on several hosts. girih uses it only to refuse
            runs.
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

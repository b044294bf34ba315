"""Facts: what is known before a run. Frozen, plain values; a plan is a function of them."""

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
        columns: numbers per example that are aggregated.
        colocated_features: features that one trainer must have together.
    """

    name: str
    aggregation: str
    columns: int
    colocated_features: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as a planner sees it.

    Attributes:
        name: of its class.
        num_parameters: numbers of the dense half.
        upper_parameters: those of them that belong to no operator's features, so that each trainer has them.
        upper_weights: those of the upper parameters that are in products.
        last_bucket: those parameters whose gradients come last in the backward pass, and travel together; None: all of them.
        operators: substitutable operators, in the order in which the model declares them.
        not_substitutable: why the model cannot be substituted, where it says so.
        optimizer: class of the dense optimizer, with its module; empty where there are no parameters.
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
    """Rows and ids that a training step touches: means over some batches.

    Attributes:
        rows: table → unique keys of a whole batch. rows_of_share: those of one trainer's share of it.
        widths: table → numbers per row, first-order weights included.
        ids: ids of a whole batch. ids_of_tables: table → those that are its own.
    """

    rows: Mapping[str, float]
    rows_of_share: Mapping[str, float]
    widths: Mapping[str, int]
    ids: float = 0.0
    ids_of_tables: Mapping[str, float] = field(default_factory=dict)

    def loads(self) -> dict[str, float]:
        """Table → rows touched per step × numbers per row: what it costs its owner."""
        return {name: rows * self.widths[name] for name, rows in self.rows.items()}

    @property
    def keys_of_share(self) -> float:
        """Unique keys of one trainer's share, of all tables."""
        return sum(self.rows_of_share.values())

    @property
    def numbers_of_share(self) -> float:
        """Numbers that the rows of these keys have."""
        return sum(count * self.widths[name] for name, count in self.rows_of_share.items())


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Memory and time of the model's forward and backward pass.

    Attributes:
        bytes_per_example: that the forward pass keeps for the backward pass.
        memory_bytes: that a trainer may take.
        pass_s: seconds that both take however few the examples. example_s: seconds that each example adds.
        update_s: seconds of a step of the optimizer.
        busy_threads: threads that a pass kept busy on average, at most those that it had. None where nobody measured it, all of them then.
        parameter_copies: bytes that a byte of parameters takes with one gradient and its optimizer's state: 4 for Adam.
    """

    bytes_per_example: float
    memory_bytes: float
    pass_s: float = 0.0
    example_s: float = 0.0
    update_s: float = 0.0
    parameter_copies: float = 1.0
    busy_threads: float | None = None

    def seconds(self, examples: float) -> float:
        """A forward and backward pass of ``examples`` examples."""
        return self.pass_s + self.example_s * examples


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Tables of one row layout, which one operation may serve.

    Attributes:
        dim: numbers per row, first-order weights included.
        output_vectors, output_numbers: vectors per example that its pooled outputs have, and their numbers.
        optimizer: name of the one that moves most of a row.
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
        row_bytes: of a row in memory, with its optimizer's state.
        max_rows: that it may have; None bounds nothing.
    """

    name: str
    row_bytes: int
    max_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that a strategy decides from.

    Attributes:
        num_trainers: trainers that take part.
        hosts: where each trainer listens, by rank, the same for those of one host; empty where that is not known.
        batch_size: examples per step over all trainers; None where no training data is known yet.
        device: device of the dense half. rows_on: device that rows are asked to be on, "cpu" or "gpu"; None where it is free.
        groups: tables by row layout, before a plan packs them.
        schedule: how a step is to be packed and laid out in time.
        global_batch_norm: whether batch norm is to take the moments of all trainers' examples of a step.
        compile: whether torch is to compile the dense half. clips: whether it bounds the norm of all gradients together.
        profile: measured on the first batches; None where it is not known.
        speeds: nominal ones, which plans decide from.
        dense_cost: of the model; None where it is not known. Plans decide from one without measured times.
        links: calibrated ones, to predict times with; no decision rests on them.
        calibration: of the machine, to predict a speed with.
        threads: that a trainer computes with.
        graph: the model's operators, where group servers are to have some. tagging, wire: their devices, and the codecs of activations
            and dense gradients by kind, where a plan has decided that.
        tables: all whose rows are in memory alone. free_bytes: of memory that this machine can give now; None where processes
            are on several hosts. It decides what is refused, and nothing else. memory_bytes: that this machine has.
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

"""Specification of tables: initial values, admission of new keys, eviction of old rows. Frozen, pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from girih.config import checks
from girih.errors import ConfigError
from girih.optim import SparseOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Rows start normally distributed."""

    name: ClassVar[str] = "normal"
    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        checks.number("initializer normal: mean", self.mean)
        checks.number("initializer normal: std", self.std)
        if self.std < 0:
            raise ConfigError(f"initializer normal: std = {self.std!r}: expected ≥ 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Rows start uniform in [low, high)."""

    name: ClassVar[str] = "uniform"
    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        checks.number("initializer uniform: low", self.low)
        checks.number("initializer uniform: high", self.high)
        if self.low > self.high:
            raise ConfigError(f"initializer uniform: low = {self.low!r} is above high = {self.high!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """Rows start at zero."""

    name: ClassVar[str] = "zeros"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Rows start at one value."""

    name: ClassVar[str] = "constant"
    value: float = 0.0

    def __post_init__(self) -> None:
        checks.number("initializer constant: value", self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinCount:
    """A key gets a row once it has been seen ``count`` times (counting Bloom filter of ``cells`` 8-bit cells).

    The filter may admit a key early (never late): about ``(1 - exp(-4 keys / cells))⁴`` of the keys.
    """

    name: ClassVar[str] = "min_count"
    count: int = 2
    cells: int = 1 << 20

    def __post_init__(self) -> None:
        checks.integer("admission min_count: count", self.count, 1, 255)
        checks.integer("admission min_count: cells", self.cells, 64, 1 << 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probability:
    """Each time a key without a row is seen, it gets one with probability ``p``."""

    name: ClassVar[str] = "probability"
    p: float = 0.1

    def __post_init__(self) -> None:
        checks.number("admission probability: p", self.p)
        if not 0 < self.p <= 1:
            raise ConfigError(f"admission probability: p = {self.p!r}: expected above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LRU:
    """At ``max_rows`` the least recently used row of the table leaves: exact, per shard.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "lru"
    max_rows: int

    def __post_init__(self) -> None:
        checks.integer("eviction lru: max_rows", self.max_rows, 1, (1 << 62) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LFU:
    """At ``max_rows`` the least often used rows leave, a sixteenth of the table at once.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "lfu"
    max_rows: int

    def __post_init__(self) -> None:
        checks.integer("eviction lfu: max_rows", self.max_rows, 1, (1 << 62) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TTL:
    """A row leaves when it was not used for more than ``steps`` steps, or ``seconds`` seconds.

    With ``max_rows``, the least recently used row leaves when the table is full.
    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "ttl"
    steps: int | None = None
    seconds: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("eviction ttl: expected either steps or seconds")
        for name in ("steps", "seconds", "max_rows"):
            checks.integer(f"eviction ttl: {name}", getattr(self, name), 1, (1 << 62) - 1, or_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """At ``max_rows`` no new key gets a row: it reads its initial value and its gradient is dropped, counted.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "none"
    max_rows: int

    def __post_init__(self) -> None:
        checks.integer("eviction none: max_rows", self.max_rows, 1, (1 << 62) - 1)


Initializer = Normal | Uniform | Zeros | Constant
Admission = MinCount | Probability
Eviction = LRU | LFU | TTL | Fixed
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows that share dim, optimizer, initializer, admission and eviction.

    ``None`` takes the default: dim from the features, the trainer's sparse optimizer (and first-order
    optimizer; ``optimizer`` replaces both), ``Normal(0, 0.01)``, every key admitted, no row ever evicted.
    """

    name: str
    dim: int | None = None
    optimizer: SparseOptimizer | None = None
    initializer: Initializer | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"table: name = {self.name!r}: expected a non-empty string")
        check_dim(f"table {self.name!r}", self.dim)
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(
                f"table {self.name!r}: dtype = {self.dtype!r}: expected float32, bfloat16 or float16"
            )


def check_dim(owner: str, dim: int | None) -> None:
    """Refuses widths that no row can have."""
    checks.integer(f"{owner}: dim", dim, 1, 4096, or_none=True)

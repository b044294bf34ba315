"""Specification of tables: initial values, admission of new keys, eviction of old rows. Frozen, pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from girih.config.bounds import Bounds, Finite, NonNegative
from girih.config.options import Options
from girih.errors import ConfigError
from girih.optim import SparseOptimizer

Dim = Annotated[int, Bounds(1, 4096)]
Rows = Annotated[int, Bounds(1, (1 << 62) - 1)]


class _Rule(Options):
    __slots__ = ()
    rules: ClassVar[str]
    name: ClassVar[str]

    def _owner(self) -> str:
        return f"{self.rules} {self.name}: "


class _Initializer(_Rule):
    __slots__ = ()
    rules = "initializer"


class _Admission(_Rule):
    __slots__ = ()
    rules = "admission"


class _Eviction(_Rule):
    __slots__ = ()
    rules = "eviction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal(_Initializer):
    """Rows start normally distributed."""

    name: ClassVar[str] = "normal"
    mean: Finite = 0.0
    std: NonNegative = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(_Initializer):
    """Rows start uniform in [low, high)."""

    name: ClassVar[str] = "uniform"
    low: Finite = -0.01
    high: Finite = 0.01

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.low > self.high:
            raise ConfigError(f"initializer uniform: low = {self.low!r} is above high = {self.high!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros(_Initializer):
    """Rows start at zero."""

    name: ClassVar[str] = "zeros"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(_Initializer):
    """Rows start at one value."""

    name: ClassVar[str] = "constant"
    value: Finite = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MinCount(_Admission):
    """A key gets a row once it has been seen ``count`` times (counting Bloom filter of ``cells`` 8-bit cells).

    The filter may admit a key early (never late): about ``(1 - exp(-4 keys / cells))⁴`` of the keys.
    """

    name: ClassVar[str] = "min_count"
    count: Annotated[int, Bounds(1, 255)] = 2
    cells: Annotated[int, Bounds(64, 1 << 32)] = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Probability(_Admission):
    """Each time a key without a row is seen, it gets one with probability ``p``."""

    name: ClassVar[str] = "probability"
    p: Annotated[float, Bounds(0, 1, open_low=True)] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LRU(_Eviction):
    """At ``max_rows`` the least recently used row of the table leaves: exact, per shard.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "lru"
    max_rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LFU(_Eviction):
    """At ``max_rows`` the least often used rows leave, a sixteenth of the table at once.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "lfu"
    max_rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TTL(_Eviction):
    """A row leaves when it was not used for more than ``steps`` steps, or ``seconds`` seconds.

    With ``max_rows``, the least recently used row leaves when the table is full.
    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "ttl"
    steps: Rows | None = None
    seconds: Rows | None = None
    max_rows: Rows | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("eviction ttl: expected either steps or seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(_Eviction):
    """At ``max_rows`` no new key gets a row: it reads its initial value and its gradient is dropped, counted.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.
    """

    name: ClassVar[str] = "none"
    max_rows: Rows


Initializer = Normal | Uniform | Zeros | Constant
Admission = MinCount | Probability
Eviction = LRU | LFU | TTL | Fixed
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Options):
    """Rows that share dim, optimizer, initializer, admission and eviction.

    ``None`` takes the default: dim from the features, the trainer's sparse optimizer (and first-order
    optimizer; ``optimizer`` replaces both), ``Normal(0, 0.01)``, every key admitted, no row ever evicted.
    """

    name: str
    dim: Dim | None = None
    optimizer: SparseOptimizer | None = None
    initializer: Initializer | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not self.name:
            raise ConfigError("table: name = '': expected a non-empty string")

    def _owner(self) -> str:
        return f"table {self.name!r}: "

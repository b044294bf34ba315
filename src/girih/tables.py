"""Specification of tables: initial values, admission of new keys, eviction of old rows. Frozen, pure."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from girih.config.bounds import Bounds, Finite, NonNegative
from girih.config.options import Options
from girih.errors import ConfigError
from girih.optim import SparseOptimizer

Dim = Annotated[int, Bounds(1, 4096)]
Rows = Annotated[int, Bounds(1, (1 << 62) - 1)]


class _Rule(Options):
    owner = "{self.rules} {self.name}: "
    rules: ClassVar[str]
    name: ClassVar[str]


class _Initializer(_Rule):
    rules = "initializer"


class _Admission(_Rule):
    rules = "admission"


class _Eviction(_Rule):
    rules = "eviction"


class Normal(_Initializer):
    """Initial values are normally distributed.

    Attributes:
        mean: mean of the distribution.
        std: standard deviation of the distribution.
    """

    name = "normal"
    mean: Finite = 0.0
    std: NonNegative = 0.01


class Uniform(_Initializer):
    """Initial values are uniform in [low, high).

    Attributes:
        low: the smallest value.
        high: the end of the range; no value reaches it.
    """

    name = "uniform"
    low: Finite = -0.01
    high: Finite = 0.01

    def _check(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"initializer uniform: low = {self.low!r} is above high = {self.high!r}")


class Zeros(_Initializer):
    """Initial values are zero."""

    name = "zeros"


class Constant(_Initializer):
    """Initial values are one constant.

    Attributes:
        value: the constant.
    """

    name = "constant"
    value: Finite = 0.0


class MinCount(_Admission):
    """A key gets a row when it has been seen ``count`` times (counting Bloom filter of ``cells`` 8-bit cells).

    The filter may admit a key early (never late): about ``(1 - exp(-4 keys / cells))⁴`` of the keys.

    Attributes:
        count: the number of times that a key is seen before it has a row, that time included.
        cells: number of 8-bit cells of the filter.
    """

    name = "min_count"
    count: Annotated[int, Bounds(1, 255)] = 2
    cells: Annotated[int, Bounds(64, 1 << 32)] = 1 << 20


class Probability(_Admission):
    """A key without a row gets one with probability ``p`` each time it is seen.

    Attributes:
        p: the probability.
    """

    name = "probability"
    p: Annotated[float, Bounds(0, 1, open_low=True)] = 0.1


class LRU(_Eviction):
    """At ``max_rows``, the least recently used row of the table leaves: exact, per shard.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        max_rows: the maximum number of rows of the table.
    """

    name = "lru"
    max_rows: Rows


class LFU(_Eviction):
    """At ``max_rows``, the least often used rows leave, a sixteenth of the table at once.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        max_rows: the maximum number of rows of the table.
    """

    name = "lfu"
    max_rows: Rows


class TTL(_Eviction):
    """A row leaves if it was not used for more than ``steps`` steps, or ``seconds`` seconds.

    With ``max_rows``, the least recently used row leaves when the table is full. ``max_rows`` is divided over the
    shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        steps: training steps that a row stays without use; give either this or ``seconds``.
        seconds: seconds that a row stays without use.
        max_rows: the maximum number of rows of the table; None means no limit.
    """

    name = "ttl"
    steps: Rows | None = None
    seconds: Rows | None = None
    max_rows: Rows | None = None

    def _check(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("eviction ttl: expected either steps or seconds")


class Fixed(_Eviction):
    """At ``max_rows``, new keys get no rows. They read their initial value, and their gradients are dropped and
    counted.

    ``max_rows`` is divided over the shards, rounded up: with N shards a table may hold up to N - 1 rows more.

    Attributes:
        max_rows: the maximum number of rows of the table.
    """

    name = "none"
    max_rows: Rows


Initializer = Normal | Uniform | Zeros | Constant
Admission = MinCount | Probability
Eviction = LRU | LFU | TTL | Fixed
Dtype = Literal["float32", "bfloat16", "float16"]


class Table(Options):
    """Rows that share dim, optimizer, initializer, admission and eviction.

    ``None`` takes the default: dim from the features, the trainer's sparse optimizer (and first-order
    optimizer; ``optimizer`` replaces both), ``Normal(0, 0.01)``, every key admitted, no row ever evicted.

    Attributes:
        name: name of the table, the same as in ``table`` of its features.
        dim: width of a row.
        optimizer: optimizer of the rows.
        initializer: initial values of new rows.
        admission: the rule by which a key gets a row.
        eviction: the rule by which rows leave, and the maximum number of rows.
        dtype: number format of the rows.
    """

    owner = "table {self.name!r}: "

    name: str
    dim: Dim | None = None
    optimizer: SparseOptimizer | None = None
    initializer: Initializer | None = None
    admission: Admission | None = None
    eviction: Eviction | None = None
    dtype: Dtype = "float32"

    def _check(self) -> None:
        if not self.name:
            raise ConfigError("table: name = '': expected a non-empty string")

"""The sparse half on a GPU: its parts and a step, beside the rate of copies.

    girih bench gpu                     26 features × 65,536 examples, D = 64 and 128; 1,048,576 keys of 10 tables, Zipf 1.05
    girih bench gpu --quick             a few hundred keys: shows that it runs, also where kernels are interpreted
    girih bench gpu --page docs/gpu.md  writes the figures, and which goals are met, into the page as well

Beside it, with the same ids: ``nn.EmbeddingBag`` under ``torch.compile``, and FBGEMM's TBE where it is installed. The second table has
dedup and the finding of keys alone, the third whole models beside their dense halves alone, as they
are and compiled by torch (``train.compile``).

``bytes`` are those that a step cannot do without (docs/gpu.md says which), ``of copies`` is their rate beside that of a copy of
1 GB on the device, measured in the same run. Times are medians, by events of the device, which is kept busy before each part, so that
what the host does to start it is not in them; ``host ms`` is a whole step by the clock. Batches are copied to the device in the first part.
What is to be reached stands in gpu_goals.py.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_goals
import gpu_models
import harness
import numpy as np
import torch
from gpu_peers import CompiledBag, Tbe

import girih
from girih.data import Batch
from girih.kernels.gpu import jit
from girih.kernels.gpu.dedup import unique
from girih.sparse.groups.gpu_group import GpuGroup
from girih.sparse.groups.pack import pack
from girih.store import Store
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.options import Gpu, GpuTier
from girih.store.gpu.record_kernels import Keys

OPTIMIZERS = {"sgd": girih.optim.SGD(lr=0.01), "adam": girih.optim.Adam(lr=0.01)}
STATE = {"sgd": 0, "adam": 2}
_HEAD_START = 20_000_000  # cycles in which the host runs ahead
SECTOR = 32  # bytes of a GPU's caches that come together
PARTS = ("dedup and sort", "lookup", "pool", "backward and update")


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the device's time that some work takes."""
    if jit.INTERPRETED:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)


class Girih:
    """Tables in GPU memory, full before timing.

    Args:
        rows: of each table. hot_rows: of all tables, in GPU memory above the host's; None has all there, without tiers.
    """

    def __init__(
        self,
        features: int,
        examples: int,
        rows: int,
        dim: int,
        optimizer: str,
        hot_rows: int | None = None,
    ) -> None:
        names = [f"f{number}" for number in range(features)]
        schema = girih.Schema([girih.Categorical(name=name, dim=dim) for name in names], labels="click")
        needs = {name: frozenset({"embedding"}) for name in names}
        (self.group,) = pack(schema, needs, OPTIMIZERS[optimizer])
        if hot_rows is None:
            self.store = Store(self.group.spec, arena=Gpu())
        else:
            tier = GpuTier(hot_rows=hot_rows, flush_every_steps=10, warm_up_steps=5)
            self.store = Store(self.group.spec, gpu_tier=tier)
        self.gpu = GpuGroup(self.group, [self.store])
        self.features, self.examples, self.step = features, examples, 0
        for start in range(0, rows, 1 << 20):
            ids = torch.arange(start, min(rows, start + (1 << 20)), device=jit.device())
            for table in range(features):
                tables = torch.full_like(ids, table, dtype=torch.int32)
                ones, most = torch.ones_like(tables), np.zeros(features, np.int64)
                self.store.state.read(Keys(ids, tables, ones, ones[:1] * len(ids), most), 1)
        self.gradient = torch.randn(examples * features, dim, device=jit.device())

    def batch(self, ids: Any) -> Batch:
        """int64[F · B], one id per bag."""
        offsets = np.arange(len(ids) + 1, dtype=np.int32)
        nothing = np.empty((self.examples, 0), np.float32)
        return Batch(
            ids=ids, offsets=offsets, numeric=nothing, labels=np.zeros((self.examples, 1), np.float32)
        )

    def run(self, batch: Batch) -> tuple[float, ...]:
        """Seconds of each part of a step, as :data:`PARTS` has them."""
        self.step += 1
        kept: dict[str, Any] = {}

        def find() -> None:  # on this stream, whose time is taken
            kept["found"] = self.gpu._bags.find(batch, train=True)

        def look() -> None:
            kept["read"], kept["fill"] = self.gpu.lookup(batch, self.step, train=True, found=kept["found"])

        def move() -> None:
            given = self.gpu.gradients(kept["read"], [self.gradient], batch)
            assert given is not None
            self.gpu.apply(kept["read"], given, self.step, 1.0)

        parts = timed(find), timed(look), timed(lambda: kept["fill"](slice(0, self.examples))), timed(move)
        self.num_unique = int(kept["found"].unique.num_keys)
        return parts

    def step_at_once(self, batch: Batch) -> float:
        """Seconds of a step by the clock, until the device is done, ids prepared on their own stream."""
        self.step += 1
        _settled()
        start = time.perf_counter()
        found = self.gpu.find(batch)
        self.gpu.fetch(found)
        read, fill = self.gpu.lookup(batch, self.step, train=True, found=found)
        fill(slice(0, self.examples))
        given = self.gpu.gradients(read, [self.gradient], batch)
        assert given is not None
        self.gpu.apply(read, given, self.step, 1.0)
        _settled()
        return time.perf_counter() - start


def _settled() -> None:
    if not jit.INTERPRETED:
        torch.cuda.synchronize()


def zipf(rng: np.random.Generator, exponent: float, rows: int, size: int) -> Any:
    """Ids by a Zipf law over ``rows`` ranks."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    ends = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(ends, rng.random(size)), rows - 1).astype(np.int64)


def copy_rate(num_bytes: int) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.empty(num_bytes // 4, device=jit.device())
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / min(timed(lambda: target.copy_(source)) for _ in range(5))


def main() -> None:
    """Runs the benchmark; status 1 where a part of it failed, which the report says."""
    parser = harness.parser("gpu", __doc__)
    parser.add_argument("--quick", action="store_true", help="a few hundred keys")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="a page whose section of figures is written anew"
    )
    arguments = parser.parse_args()
    if arguments.page is not None and jit.INTERPRETED:
        parser.error("--page: kernels are interpreted here; expected a GPU")
    if arguments.quick:
        arguments.rounds = 2
    report = harness.Report("gpu", arguments)
    copies = copy_rate(1 << (16 if arguments.quick else 30))
    report.table("copies of 1 GB on the device, read and written", {"bytes/s": "{:.3e}"}).row(
        {"bytes/s": copies}
    )
    parts = {
        "the sparse half": sparse_half,
        "keys alone": keys_alone,
        "tiers": tiers,
        "whole models": whole_models,
    }
    failed = [name for name, part in parts.items() if not attempted(report, name, part, arguments, copies)]
    report.finish()
    if arguments.page is not None:
        gpu_goals.write_section(arguments.page, arguments.json)
    for each in gpu_goals.judged(report.as_dict()):
        print(f"{each.verdict}: {each.goal.what}, {each.goal.column}")
    sys.exit(1 if failed else 0)


def attempted(report: harness.Report, name: str, part: Callable[..., None], *given: Any) -> bool:
    """Runs a part of the benchmark; where it fails, the others still run, and the report says why."""
    try:
        part(report, *given)
    except Exception as error:
        traceback.print_exc()
        report.skip(name, f"failed: {' '.join(str(error).split())[:300]}")
        return False
    return True


def sparse_half(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """The parts of a step and the whole, beside other people's tables."""
    cases = [
        ("26 × 65,536", 26, 65_536, 1_000_000, 1.05, (64, 128)),
        ("10 × 104,858", 10, 104_858, 1_000_000, 1.05, (128,)),
    ]
    if arguments.quick:
        cases = [("3 × 100", 3, 100, 500, 1.05, (16,))]
    peers: dict[str, Callable[..., Any]] = {}
    if jit.INTERPRETED:
        report.skip("nn.EmbeddingBag, compiled", "it is compiled for the GPU")
    else:
        peers["nn.EmbeddingBag, compiled"] = CompiledBag
    if report.peer("fbgemm_gpu", "its wheel for CUDA is needed") is not None and not jit.INTERPRETED:
        peers["FBGEMM"] = Tbe
    report.not_identical("girih's tables grow and are asked by keys, the others' are static arrays")
    report.not_identical(
        "girih's batches are copied to the device in its first part, the others' ids lie there"
    )
    table = report.table(
        "the sparse half on a GPU",
        {"keys": "{}", "D": "{}", "optimizer": "{}", "unique": "{:,}"}
        | {f"{part} ms": "{:.3f}" for part in PARTS}
        | {"step ms": "{:.3f}", "host ms": "{:.3f}", "bytes": "{:,}"}
        | {"forward, of copies": "{:.0%}", "backward, of copies": "{:.0%}"}
        | {f"{name} ms": "{:.3f}" for name in peers},
    )
    for title, features, examples, rows, exponent, dims in cases:
        rng = np.random.default_rng(0)
        for dim in dims:
            for optimizer in OPTIMIZERS:
                side = Girih(features, examples, rows, dim, optimizer)
                batches = [
                    side.batch(zipf(rng, exponent, rows, features * examples))
                    for _ in range(min(8, arguments.rounds))
                ]
                measured = [
                    side.run(batches[number % len(batches)]) for number in range(arguments.rounds + 5)
                ][5:]
                host = float(np.median([side.step_at_once(batch) for batch in batches]))
                side.store.close()
                parts = [harness.median_part(measured, part) for part in range(len(PARTS))]
                keys, forward, backward = bytes_on_paper(features * examples, side.num_unique, dim, optimizer)
                arm = {"keys": title, "D": dim, "optimizer": optimizer, "unique": side.num_unique}
                times = {f"{part} ms": 1e3 * seconds for part, seconds in zip(PARTS, parts, strict=True)}
                shares = {
                    "forward, of copies": forward / parts[2] / copies,
                    "backward, of copies": backward / parts[3] / copies,
                }
                others = {
                    f"{name} ms": peer_step(
                        report, name, peer, features, examples, rows, dim, optimizer, batches
                    )
                    for name, peer in peers.items()
                }
                whole = {
                    "step ms": 1e3 * sum(parts),
                    "host ms": 1e3 * host,
                    "bytes": keys + forward + backward,
                }
                table.row(arm | times | whole | shares | others)


def bytes_on_paper(n: int, unique: int, dim: int, optimizer: str) -> tuple[int, int, int]:
    """Bytes that finding keys, pooling, and the way back cannot do without: see docs/gpu.md, "How a batch goes".

    Args:
        n: ids; unique: keys of theirs.
    """
    row, slots = 4 * dim, 1 << (2 * n - 1).bit_length()
    keys = n * (8 + 6 * SECTOR + 4 * 24 + 20) + 4 * slots + unique * 3 * SECTOR
    forward = n * (4 + row) + unique * (8 + row)
    backward = n * (24 + row) + unique * (4 + 2 * row + 2 * row * (1 + STATE[optimizer]))
    return keys, forward, backward


def tiers(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Steps with a tenth of the rows hot."""
    table = report.table(
        "tiers: 10 tables, D = 128, SGD, a tenth of the rows hot in GPU memory above the host's",
        {
            "unique keys of a batch": "{:,}",
            "of the hot rows": "{:.0%}",
            "hits": "{:.0%}",
            "host ms": "{:.2f}",
        },
    )
    for share in (0.8, 1.0):
        table.row(hot_tier(500 if arguments.quick else 1_000_000, share, 2 if arguments.quick else 20))


def whole_models(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Samples/s of whole models beside those of their dense halves."""
    models = report.table(
        "whole models, samples/s",
        {"model": "{}", "dense half": "{}", "batch": "{:,}", "step": "{:,.0f}"}
        | {"dense half alone": "{:,.0f}", "of it": "{:.2f}"},
    )
    rng = np.random.default_rng(1)
    size, ranks = (64, 500) if arguments.quick else (65_536, 1_000_000)
    steps = 2 if arguments.quick else 50
    given = gpu_models.batches(size, 4, lambda count: zipf(rng, 1.05, ranks, count))
    for name in gpu_models.MODELS:
        for compile in (False, True):
            arm = {"model": name, "dense half": "compiled" if compile else "plain", "batch": size}
            if compile and jit.INTERPRETED:
                report.skip(f"{name}, compiled", "it is compiled for the GPU")
                continue
            try:
                whole, alone = gpu_models.samples_per_s(name, given, steps, compile=compile)
            except (girih.ConfigError, RuntimeError) as error:
                if not compile:
                    raise
                report.skip(f"{name}, {arm['dense half']}", " ".join(str(error).split())[:200])
                continue
            models.row(arm | {"step": whole, "dense half alone": alone, "of it": whole / alone})


def peer_step(
    report: harness.Report, name: str, peer: Callable[..., Any], *shape_and_batches: Any
) -> float | None:
    """Median milliseconds of a step of somebody else's tables, on ids that are on the device; None where it fails."""
    try:
        return 1e3 * _peer_step(peer, *shape_and_batches)
    except Exception as error:  # out of memory, what it does not compile, or a package of another build: ours is measured all the same
        report.skip(name, " ".join(f"{type(error).__name__}: {error}".split())[:200])
        return None
    finally:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _peer_step(
    peer: Callable[..., Any],
    features: int,
    examples: int,
    rows: int,
    dim: int,
    optimizer: str,
    batches: list[Batch],
) -> float:
    side = peer(features, rows, dim, optimizer)
    joined = peer is CompiledBag  # whose tables follow each other in one
    device, n = jit.device(), features * examples
    first = torch.arange(features, device=device).repeat_interleave(examples) * (rows if joined else 0)
    given = [to_device(batch.ids, device) + first for batch in batches]
    offsets = torch.arange(n + 1, device=device)
    gradient = torch.randn((n, dim) if joined else (examples, features * dim), device=device)
    times = []
    for number in range(8 + 2 * len(given)):
        ids = given[number % len(given)]
        times.append(timed(lambda ids=ids: side.step(ids, offsets, gradient)))
    return float(np.median(times[8:]))


def hot_tier(rows: int, share: float, rounds: int) -> dict[str, float]:
    """Steps on tables of ``rows`` rows each, whose batches have ``share`` as many unique keys as there are hot rows."""
    features, rng = 10, np.random.default_rng(3)
    each = int(share * rows / features)  # of each table, as many as it has hot rows on the average
    side = Girih(features, each, rows, 128, "sgd", hot_rows=rows)

    def ids() -> Any:
        drawn = [np.unique(zipf(rng, 1.05, rows, 16 * each)) for _ in range(features)]
        return np.concatenate([rng.choice(one, each, replace=len(one) < each) for one in drawn])

    batches = [side.batch(ids()) for _ in range(8)]
    for number in range(20):  # hot rows are chosen meanwhile
        side.run(batches[number % 8])
    before = side.store.tier_counters()
    times = [side.step_at_once(batches[number % 8]) for number in range(rounds)]
    reads = {name: side.store.tier_counters()[name] - before[name] for name in ("gpu_reads", "dram_reads")}
    unique_keys = side.num_unique
    side.store.close()
    return {
        "unique keys of a batch": unique_keys,
        "of the hot rows": unique_keys / rows,
        "hits": reads["gpu_reads"] / max(1, sum(reads.values())),
        "host ms": 1e3 * float(np.median(times)),
    }


def keys_alone(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Dedup of Zipf ids, and finding keys in an index half full."""
    keys = report.table("keys alone", {"what": "{}", "keys": "{:,}", "ms": "{:.4f}", "keys/s": "{:.2e}"})
    for what, count, seconds in dedup_and_find(500 if arguments.quick else 1 << 20, arguments.rounds):
        keys.row({"what": what, "keys": count, "ms": 1e3 * seconds, "keys/s": count / seconds})


def dedup_and_find(size: int, rounds: int) -> list[tuple[str, int, float]]:
    """(what, keys, median seconds) of both."""
    device, rng = jit.device(), np.random.default_rng(2)
    ids = to_device(zipf(rng, 1.05, size, size), device)
    nothing = torch.zeros(2, dtype=torch.int32, device=device)
    dedup = [timed(lambda: unique(ids, nothing, nothing[:1], size)) for _ in range(rounds + 3)][3:]
    side = Girih(1, 1, 1, 16, "sgd")
    rows, memory = side.store.state.rows, side.store.state.memory
    memory.make_room(size // 2)
    memory.known()  # that none of them came
    keys = rng.permutation(memory.num_slots // 2 - 2)
    tables = torch.zeros(len(keys), dtype=torch.int32, device=device)
    num = torch.full((1,), len(keys), dtype=torch.int32, device=device)
    asked = Keys(
        to_device(keys.astype(np.int64), device), tables, torch.ones_like(tables), num, np.array([len(keys)])
    )
    side.store.state.read(asked, 1)
    load = len(keys) / memory.num_slots
    find = [timed(lambda: rows._find(asked, None, marks=False)) for _ in range(rounds + 3)][3:]
    side.store.close()
    return [
        (
            f"dedup, {int(unique(ids, nothing, nothing[:1], size).num_keys):,} unique",
            size,
            float(np.median(dedup)),
        ),
        (f"find, the index {load:.0%} full", len(keys), float(np.median(find))),
    ]


if __name__ == "__main__":
    main()

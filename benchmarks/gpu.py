"""The sparse half on a GPU: its parts and a step, beside the rate of copies.

    girih bench gpu                     26 features × 65,536 examples, D = 64 and 128; 1,048,576 keys of 10 tables, Zipf 1.05
    girih bench gpu --quick             a few hundred keys: shows that it runs, also where kernels are interpreted

Beside it, with the same ids: ``nn.EmbeddingBag`` under ``torch.compile``, and FBGEMM's TBE where it is installed. The second table has
dedup and the finding of keys alone, the third whole models beside their dense halves alone.

``bytes`` are those that a step cannot do without (docs/gpu.md says which), ``of copies`` is their rate beside that of a copy of
1 GB on the device, measured in the same run. Times are medians, by events of the device, which is kept busy before each part, so that
what the host does to start it is not in them; ``host ms`` is a whole step by the clock. Batches are copied to the device in the first part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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
from girih.store.gpu.gpu_rows import Keys
from girih.store.gpu.options import Gpu

OPTIMIZERS = {"sgd": girih.optim.SGD(lr=0.01), "adam": girih.optim.Adam(lr=0.01)}
STATE = {"sgd": 0, "adam": 2}
_HEAD_START = 20_000_000  # cycles in which the host runs ahead
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
        rows: of each table.
    """

    def __init__(self, features: int, examples: int, rows: int, dim: int, optimizer: str) -> None:
        names = [f"f{number}" for number in range(features)]
        schema = girih.Schema([girih.Categorical(name=name, dim=dim) for name in names], labels="click")
        needs = {name: frozenset({"embedding"}) for name in names}
        (self.group,) = pack(schema, needs, OPTIMIZERS[optimizer])
        self.store = Store(self.group.spec, arena=Gpu())
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

        def find() -> None:
            kept["found"] = self.gpu.find(batch)
            if kept["found"].ready is not None:
                torch.cuda.current_stream().wait_event(kept["found"].ready)

        def look() -> None:
            kept["read"], kept["fill"] = self.gpu.lookup(batch, self.step, train=True, found=kept["found"])

        def move() -> None:
            given = self.gpu.gradients(kept["read"], [self.gradient], batch)
            assert given is not None
            self.gpu.apply(kept["read"], given, self.step, 1.0)

        fill = timed(find), timed(look), timed(lambda: kept["fill"](slice(0, self.examples))), timed(move)
        self.num_unique = int(kept["found"].unique.num_keys)
        return fill


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
    """Runs the benchmark."""
    parser = harness.parser("gpu", __doc__)
    parser.add_argument("--quick", action="store_true", help="a few hundred keys")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    report = harness.Report("gpu", arguments)
    copies = copy_rate(1 << (16 if arguments.quick else 30))
    cases = [
        ("26 × 65,536", 26, 65_536, 1_000_000, 1.05, (64, 128)),
        ("10 × 104,858", 10, 104_858, 1_000_000, 1.05, (128,)),
    ]
    if arguments.quick:
        cases, arguments.rounds = [("3 × 100", 3, 100, 500, 1.05, (16,))], 2
    peers = {"nn.EmbeddingBag, compiled": CompiledBag}
    if report.peer("fbgemm_gpu", "its wheel for CUDA is needed") is not None and not jit.INTERPRETED:
        peers["FBGEMM"] = Tbe
    report.not_identical("girih's tables grow and are asked by keys, the others' are static arrays")
    table = report.table(
        f"the sparse half on a GPU; copies: {copies / 1e9:,.0f} GB/s",
        {"keys": "{}", "D": "{}", "optimizer": "{}", "unique": "{:,}"}
        | {f"{part} ms": "{:.3f}" for part in PARTS}
        | {"step ms": "{:.3f}",
            "host ms": "{:.3f}", "forward, of copies": "{:.0%}", "backward, of copies": "{:.0%}"}
        | {f"{name} ms": "{:.3f}" for name in peers},
    )  # fmt: skip
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
                start = time.perf_counter()
                for batch in batches:
                    side.run(batch)
                host = (time.perf_counter() - start) / len(batches)
                parts = [harness.median_part(measured, part) for part in range(len(PARTS))]
                n, unique, row = features * examples, side.num_unique, 4 * dim
                forward = n * (4 + row) + unique * (8 + row)
                backward = n * (24 + row) + unique * (4 + 2 * row + 2 * row * (1 + STATE[optimizer]))
                table.row(
                    {
                        "keys": title,
                        "D": dim,
                        "optimizer": optimizer,
                        "unique": unique,
                        "step ms": 1e3 * sum(parts),
                        "host ms": 1e3 * host,
                    }
                    | {f"{part} ms": 1e3 * seconds for part, seconds in zip(PARTS, parts, strict=True)}
                    | {
                        "forward, of copies": forward / parts[2] / copies,
                        "backward, of copies": backward / parts[3] / copies,
                    }
                    | {
                        f"{name} ms": 1e3 * peer_step(peer, features, examples, rows, dim, optimizer, batches)
                        for name, peer in peers.items()
                    }
                )
                side.store.close()
    keys = report.table("keys alone", {"what": "{}", "keys": "{:,}", "ms": "{:.4f}", "keys/s": "{:.2e}"})
    for what, count, seconds in keys_alone(500 if arguments.quick else 1 << 20, arguments.rounds):
        keys.row({"what": what, "keys": count, "ms": 1e3 * seconds, "keys/s": count / seconds})
    models = report.table(
        "whole models, samples/s",
        {"model": "{}", "batch": "{:,}", "step": "{:,.0f}", "dense half alone": "{:,.0f}", "of it": "{:.2f}"},
    )
    rng = np.random.default_rng(1)
    size, ranks = (64, 500) if arguments.quick else (65_536, 1_000_000)
    given = gpu_models.batches(size, 4, lambda count: zipf(rng, 1.05, ranks, count))
    for name in gpu_models.MODELS:
        whole, alone = gpu_models.samples_per_s(name, given, 2 if arguments.quick else 50)
        models.row(
            {"model": name, "batch": size, "step": whole, "dense half alone": alone, "of it": whole / alone}
        )
    report.finish()


def peer_step(
    peer: Callable[..., Any],
    features: int,
    examples: int,
    rows: int,
    dim: int,
    optimizer: str,
    batches: list[Batch],
) -> float:
    """Median seconds of a step of somebody else's tables, on ids that are on the device."""
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


def keys_alone(size: int, rounds: int) -> list[tuple[str, int, float]]:
    """(what, keys, median seconds): dedup of Zipf ids, and finding keys in an index half full."""
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

"""The sparse half on a GPU: its parts and a step, compared with the rate of copies.

    girih bench gpu                     all parts; keys by a Zipf law with exponent 1.05
    girih bench gpu --quick             a few hundred keys: shows that it runs, also with interpreted kernels
    girih bench gpu --parts keys,tiers  some parts; --no-peers leaves out the part that measures other tables
    girih bench gpu --page docs/gpu.md  also writes the figures and the goals into the page
    girih bench gpu --from-results --page docs/gpu.md   writes the page from the JSON of an earlier run

Parts:

    sparse   a step of 1,048,580 keys of 10 tables with D = 128, then of 26 features × 65,536 examples with D = 64 and 128
    kernels  device time of each kernel of such a step, by torch's profiler
    keys     deduplication alone, and the search of keys in an index that is half full
    models   whole models and their dense halves alone, plain and compiled by torch (``train.compile``)
    tiers    steps with a tenth of the rows in GPU memory
    peers    steps of ``nn.EmbeddingBag`` under ``torch.compile`` and of FBGEMM's TBE, with the same ids, one process each

The JSON is rewritten after every row. ``--resume TAG`` keeps its rows if they have the same tag, options, GPU and versions.

``bytes`` are the least that a step has to move (docs/gpu.md lists them). ``of copies`` is their rate divided by the rate of a copy of
1 GB on the device in the same run. Times are medians, by events of the device. The device is kept busy before each part, so times do
not include the host's work. ``host ms`` is a whole step by the clock. Batches are copied to the device in the first part.
gpu_goals.py has the goals.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_goals
import gpu_models
import gpu_peers
import gpu_profile
import harness
import numpy as np
import torch
from gpu_timing import distinct, timed, wait_for_device, zipf

import girih
from girih.data import Batch
from girih.data.batch import single_bags
from girih.errors import ConfigError
from girih.kernels.gpu import jit
from girih.kernels.gpu.dedup import unique
from girih.sparse.groups.gpu_group import GpuGroup
from girih.sparse.groups.pack import pack
from girih.store import Store
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.options import Gpu, GpuTier
from girih.store.gpu.record_kernels import DeviceKeys

OPTIMIZERS = {"sgd": girih.optim.SGD(lr=0.01), "adam": girih.optim.Adam(lr=0.01)}
STATE = {"sgd": 0, "adam": 2}
FAILED = "failed: "
"""Beginning of the reason why a part was left out that raised an error."""
SECTOR = 32  # bytes of a GPU's caches that come together
STEP_PARTS = ("dedup and sort", "lookup", "pool", "backward and update")


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
                self.store.state.read(DeviceKeys(ids, tables, ones, ones[:1] * len(ids), most), 1)
        self.gradient = torch.randn(examples * features, dim, device=jit.device())

    def batch(self, ids: Any) -> Batch:
        """int64[F · B], one id per bag, with the offsets that readers share."""
        offsets = single_bags(len(ids))
        nothing = np.empty((self.examples, 0), np.float32)
        return Batch(
            ids=ids, offsets=offsets, numeric=nothing, labels=np.zeros((self.examples, 1), np.float32)
        )

    def run(self, batch: Batch) -> tuple[float, ...]:
        """Seconds of each part of a step, as :data:`STEP_PARTS` has them."""
        self.step += 1
        kept: dict[str, Any] = {}

        def find() -> None:  # on this stream, whose time is taken
            kept["found"] = self.gpu._bags.find(batch, train=True)

        def look() -> None:
            kept["read"], kept["fill"] = self.gpu.lookup(batch, self.step, train=True, keys=kept["found"])

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
        wait_for_device()
        start = time.perf_counter()
        found = self.gpu.find(batch)
        self.gpu.fetch(found)
        read, fill = self.gpu.lookup(batch, self.step, train=True, keys=found)
        fill(slice(0, self.examples))
        given = self.gpu.gradients(read, [self.gradient], batch)
        assert given is not None
        self.gpu.apply(read, given, self.step, 1.0)
        wait_for_device()
        return time.perf_counter() - start


def copy_rate(num_bytes: int) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.empty(num_bytes // 4, device=jit.device())
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / min(timed(lambda: target.copy_(source)) for _ in range(5))


def main() -> None:
    """Runs the benchmark; status 1 if a part of it failed, which the report says."""
    parser = harness.parser("gpu", __doc__, resumes=True)
    parser.add_argument("--quick", action="store_true", help="a few hundred keys")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parts", type=part_names, metavar="A,B", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--no-peers", action="store_true", help="leave out the part peers")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="a page whose section of figures is rewritten"
    )
    parser.add_argument("--from-results", action="store_true", help="measure nothing, read --json")
    arguments = parser.parse_args()
    if arguments.no_peers:
        arguments.parts = [name for name in arguments.parts if name != "peers"]
    if not arguments.parts:
        parser.error("--parts peers and --no-peers leave no part; expected one of them")
    if arguments.page is not None and jit.INTERPRETED and not arguments.from_results:
        parser.error("--page: kernels are interpreted here; expected a GPU")
    if not (arguments.from_results or jit.INTERPRETED or torch.cuda.is_available()):
        parser.error("there is no GPU; TRITON_INTERPRET=1 and --quick run it without one")
    status = 0 if arguments.from_results else measure_parts(arguments)
    try:
        results = json.loads(arguments.json.read_text())
        verdicts = gpu_goals.compare_goals(results)
        reasons = [f"{name}: {reason}" for name, reason in results["skipped"].items()]
        if arguments.page is not None:
            gpu_goals.write_section(arguments.page, results)
    except ConfigError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or arguments.page}: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"{arguments.json}: {error!s}; expected the JSON of girih bench gpu, measured on a GPU")
    for verdict in verdicts:
        print(f"{verdict.verdict}: {verdict.goal.what}, {verdict.goal.column}")
    for reason in reasons:
        if f": {FAILED}" in reason:
            print(reason)
    sys.exit(status)


def part_names(text: str) -> list[str]:
    """Names of parts that are separated by commas, in the order of PARTS."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def measure_parts(arguments: argparse.Namespace) -> int:
    """Runs the parts and writes the JSON after every row; 1 if one of them failed."""
    if arguments.quick:
        arguments.rounds = 2
    report = harness.Report("gpu", arguments)
    table = report.table("copies of 1 GB on the device, read and written", {"bytes/s": "{:.3e}"})
    if not table.rows:
        table.row({"bytes/s": copy_rate(1 << (16 if arguments.quick else 30))})
    copies = table.rows[0]["bytes/s"]
    failed = [name for name in arguments.parts if not run_part(report, name, arguments, copies)]
    report.finish()
    return 1 if failed else 0


def run_part(report: harness.Report, name: str, arguments: argparse.Namespace, copies: float) -> bool:
    """Runs a part of the benchmark. If it fails, the report says why, and the other parts still run."""
    report.forget(name)
    try:
        PARTS[name](report, arguments, copies)
    except Exception as error:
        traceback.print_exc()
        report.skip(name, f"{FAILED}{' '.join(str(error).split())[:300]}")
        return False
    return True


def sparse_half(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """The parts of a step, and the whole."""
    report.not_identical("girih's batches are copied to the device in its first part")
    table = report.table(
        "the sparse half on a GPU",
        {"keys": "{}", "D": "{}", "optimizer": "{}", "unique": "{:,}"}
        | {f"{part} ms": "{:.3f}" for part in STEP_PARTS}
        | {"step ms": "{:.3f}", "host ms": "{:.3f}", "bytes": "{:,}"}
        | {"forward, of copies": "{:.0%}", "backward, of copies": "{:.0%}"},
    )
    for case in QUICK if arguments.quick else CASES:
        arms = [{"keys": case.title, "D": dim, "optimizer": name} for dim in case.dims for name in OPTIMIZERS]
        arms = [arm for arm in arms if not table.has(arm)]
        ids = case.ids(min(8, arguments.rounds)) if arms else []
        for arm in arms:
            table.row(arm | step_times(case, arm["D"], arm["optimizer"], ids, arguments.rounds, copies))


@dataclass(frozen=True)
class Case:
    """Shapes of batches that are measured."""

    title: str
    features: int
    examples: int
    rows: int
    dims: tuple[int, ...]

    def ids(self, count: int) -> list[Any]:
        """Ids of that many batches."""
        rng = np.random.default_rng(0)
        return [zipf(rng, 1.05, self.rows, self.features * self.examples) for _ in range(count)]


MILLION = Case("10 × 104,858", 10, 104_858, 1_000_000, (128,))
CASES = (MILLION, Case("26 × 65,536", 26, 65_536, 1_000_000, (64, 128)))
QUICK = (Case("3 × 100", 3, 100, 500, (16,)),)


def step_times(
    case: Case, dim: int, optimizer: str, ids: list[Any], rounds: int, copies: float
) -> dict[str, float]:
    """Times of a step and its parts, and bytes on paper."""
    side = Girih(case.features, case.examples, case.rows, dim, optimizer)
    batches = [side.batch(drawn) for drawn in ids]
    times = [side.run(batches[number % len(batches)]) for number in range(rounds + 5)][5:]
    host = float(np.median([side.step_at_once(batch) for batch in batches]))
    side.store.close()
    parts = [harness.median_part(times, part) for part in range(len(STEP_PARTS))]
    keys, forward, backward = bytes_on_paper(case.features * case.examples, side.num_unique, dim, optimizer)
    return {
        "unique": side.num_unique,
        **{f"{part} ms": 1e3 * seconds for part, seconds in zip(STEP_PARTS, parts, strict=True)},
        "step ms": 1e3 * sum(parts),
        "host ms": 1e3 * host,
        "bytes": keys + forward + backward,
        "forward, of copies": forward / parts[2] / copies,
        "backward, of copies": backward / parts[3] / copies,
    }


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


def kernels(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Device time of each kernel of a step."""
    if jit.INTERPRETED:
        report.skip("kernels", "interpreted kernels have no device time")
        return
    table = report.table(
        "kernels of a step",
        {"keys": "{}", "D": "{}", "optimizer": "{}", "kernel": "{}"}
        | {"launches": "{:.1f}", "µs": "{:.1f}", "share": "{:.1%}"},
    )
    case = QUICK[0] if arguments.quick else MILLION
    for optimizer in OPTIMIZERS:
        arm = {"keys": case.title, "D": case.dims[0], "optimizer": optimizer}
        if table.has(arm | {"kernel": gpu_profile.ALL}):
            continue
        side = Girih(case.features, case.examples, case.rows, case.dims[0], optimizer)
        batches = [side.batch(drawn) for drawn in case.ids(4)]
        for batch in batches:
            side.step_at_once(batch)
        for row in gpu_profile.kernel_times(lambda number: side.step_at_once(batches[number % 4]), 12):  # noqa: B023
            table.row(arm | row)
        side.store.close()


def tiers(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Steps with a tenth of the rows hot."""
    columns = {
        "unique keys, of the hot rows": "{:.0%}",
        "unique keys of a batch": "{:,}",
        "hits": "{:.0%}",
        "host ms": "{:.2f}",
    }
    table = report.table(
        "tiers: 10 tables, D = 128, SGD, a tenth of the rows hot in GPU memory above the host's", columns
    )
    for share in (0.8, 1.0):
        arm = {"unique keys, of the hot rows": share}
        if not table.has(arm):
            rows, rounds = (500, 2) if arguments.quick else (1_000_000, 20)
            table.row(arm | hot_tier(rows, share, rounds))


def whole_models(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Samples/s of whole models and of their dense halves, the plain ones first."""
    table = report.table(
        "whole models, samples/s",
        {"model": "{}", "dense half": "{}", "batch": "{:,}", "step": "{:,.0f}"}
        | {"dense half alone": "{:,.0f}", "of it": "{:.2f}"},
    )
    rng = np.random.default_rng(1)
    size, ranks = (64, 500) if arguments.quick else (65_536, 1_000_000)
    steps = 2 if arguments.quick else 50
    batches = gpu_models.batches(size, 4, lambda count: zipf(rng, 1.05, ranks, count))
    for compile in (False, True):
        for name in gpu_models.MODELS:
            arm = {"model": name, "dense half": "compiled" if compile else "plain", "batch": size}
            if table.has(arm):
                continue
            if compile and jit.INTERPRETED:
                report.skip(f"models: {name}, compiled", "it is compiled for the GPU")
                continue
            try:
                whole, alone = gpu_models.samples_per_s(name, batches, steps, compile=compile)
            except (ConfigError, RuntimeError) as error:
                if not compile:
                    raise
                report.skip(f"models: {name}, compiled", " ".join(str(error).split())[:200])
                continue
            table.row(arm | {"step": whole, "dense half alone": alone, "of it": whole / alone})


def peers(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Steps of other tables, each in a process of its own, so that it has all memory of the device."""
    report.not_identical("girih's tables grow and look up keys; tables of peers are arrays of a fixed size")
    report.not_identical("ids of peers are on the device before the step")
    if jit.INTERPRETED:
        report.skip("peers", "they are compiled for the GPU")
        return
    table = report.table(
        "other tables on a GPU",
        {"peer": "{}", "keys": "{}", "D": "{}", "optimizer": "{}", "step ms": "{:.3f}"},
    )
    gc.collect()
    torch.cuda.empty_cache()
    for name in gpu_peers.PEERS:
        if name == "FBGEMM" and report.peer("fbgemm_gpu", "its wheel for CUDA is needed") is None:
            continue
        for optimizer in OPTIMIZERS:
            arm = {"peer": name, "keys": MILLION.title, "D": MILLION.dims[0], "optimizer": optimizer}
            if table.has(arm):
                continue
            shape = (MILLION.features, MILLION.examples, MILLION.rows, MILLION.dims[0])
            words = [sys.executable, gpu_peers.__file__, name, *map(str, shape), optimizer]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode == 0:
                table.row(arm | {"step ms": 1e3 * float(done.stdout.splitlines()[-1])})
            else:  # out of memory, or a package for another torch
                report.skip(f"peers: {name}, {optimizer}", " ".join(done.stderr.split())[-200:])


def hot_tier(rows: int, share: float, rounds: int) -> dict[str, float]:
    """Steps on tables of ``rows`` rows each. A batch has ``share`` times as many unique keys as there are hot rows."""
    features, rng = 10, np.random.default_rng(3)
    count = int(share * rows / features)  # unique keys of each table
    side = Girih(features, count, rows, 128, "sgd", hot_rows=rows)

    def ids() -> Any:
        drawn = [distinct(zipf(rng, 1.05, rows, 16 * count)) for _ in range(features)]
        return np.concatenate([rng.choice(one, count, replace=len(one) < count) for one in drawn])

    batches = [side.batch(ids()) for _ in range(8)]
    for number in range(20):  # hot rows are chosen meanwhile
        side.run(batches[number % 8])
    before = side.store.tier_counters()
    times = [side.step_at_once(batches[number % 8]) for number in range(rounds)]
    reads = {name: side.store.tier_counters()[name] - before[name] for name in ("gpu_reads", "dram_reads")}
    num_unique = side.num_unique
    side.store.close()
    return {
        "unique keys of a batch": num_unique,
        "hits": reads["gpu_reads"] / max(1, sum(reads.values())),
        "host ms": 1e3 * float(np.median(times)),
    }


def keys_alone(report: harness.Report, arguments: argparse.Namespace, copies: float) -> None:
    """Dedup of Zipf ids, and the search of keys in an index half full."""
    table = report.table(
        "keys alone", {"what": "{}", "keys": "{:,}", "unique": "{:,}", "ms": "{:.4f}", "keys/s": "{:.2e}"}
    )
    size = 500 if arguments.quick else 1 << 20
    for what, work in (("dedup", dedup), ("find, the index half full", find)):
        if not table.has({"what": what}):
            num_keys, num_unique, seconds = work(size, arguments.rounds)
            row = {"what": what, "keys": num_keys, "unique": num_unique}
            table.row(row | {"ms": 1e3 * seconds, "keys/s": num_keys / seconds})


def dedup(size: int, rounds: int) -> tuple[int, int, float]:
    """(ids, unique keys, median seconds) of the deduplication of Zipf ids."""
    device = jit.device()
    ids = to_device(zipf(np.random.default_rng(2), 1.05, size, size), device)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    times = [timed(lambda: unique(ids, zeros, zeros[:1], size)) for _ in range(rounds + 3)][3:]
    return size, int(unique(ids, zeros, zeros[:1], size).num_keys), float(np.median(times))


def find(size: int, rounds: int) -> tuple[int, int, float]:
    """(keys, unique keys, median seconds) of the search of keys in an index that is half full."""
    device, side = jit.device(), Girih(1, 1, 1, 16, "sgd")
    rows, memory = side.store.state.rows, side.store.state.memory
    memory.make_room(size // 2)
    memory.known()  # that none of them came
    keys = np.random.default_rng(2).permutation(memory.num_slots // 2 - 2)
    tables = torch.zeros(len(keys), dtype=torch.int32, device=device)
    num = torch.full((1,), len(keys), dtype=torch.int32, device=device)
    ids = to_device(keys.astype(np.int64), device)
    asked = DeviceKeys(ids, tables, torch.ones_like(tables), num, np.array([len(keys)]))
    side.store.state.read(asked, 1)
    times = [timed(lambda: rows._find(asked, None, marks=False)) for _ in range(rounds + 3)][3:]
    side.store.close()
    return len(keys), len(keys), float(np.median(times))


PARTS: dict[str, Callable[[harness.Report, argparse.Namespace, float], None]] = {
    "sparse": sparse_half,
    "kernels": kernels,
    "keys": keys_alone,
    "models": whole_models,
    "tiers": tiers,
    "peers": peers,
}

if __name__ == "__main__":
    main()

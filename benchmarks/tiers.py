"""Tables three times the memory for their rows, on an SSD, beside the same tables in memory.

Both train the same DLRM (26 categorical and 13 numeric features, row-wise Adagrad for rows, Adam for the network) on the
same Zipf batches, in turns; tables are filled first, so that no id is new. ``["dram", "ssd"]`` keeps the values of
1/``--times`` of all rows in memory, chosen by HybridHash (PICASSO Alg. 1), and reads the others from a file past the page
cache, asked for a batch ahead. Memory has room for more rows than hot ones: for those
of the last few batches. A hit is a row that memory had when its batch asked for it. "By frequency" is the share of hits that is to be
expected of as many rows as memory has room for, those which are most frequent by the law that ids are drawn by: no choice of hot
rows does better, unless it knows the batches to come. "Known beforehand" is that of the rows which the measured batches did read most.

    girih bench tiers                             a small table: what it costs when all is quick
    girih bench tiers --rows 2_000_000 --directory /mnt/nvme --steps 50
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pages
import torch
from ids import Shape
from scipy.special import zeta
from train import FEATURES, make_batches
from train_sides import Girih, Task

from girih.data import Batch
from girih.sparse.options import StoreOptions
from girih.store.state import ShardState
from girih.store.tiers.tiered_values import TieredValues


def main() -> None:
    parser = harness.parser("tiers", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--rows", type=int, default=20_000, help="of each feature's table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--zipf", type=float, default=1.1)
    parser.add_argument(
        "--times", type=float, default=3.0, help="all rows, by those whose values memory keeps"
    )
    parser.add_argument("--directory", type=Path, help="on the SSD; default: a temporary one")
    parser.add_argument("--shards", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=6, help="turns that count")
    parser.add_argument("--warmup", type=int, default=3, help="turns before, while frequencies are counted")
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    options = parser.parse_args()
    report = harness.Report("tiers", options)
    if not report.tables:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory, report.group():
            measure(report, options, directory)
    report.finish()


def measure(report: harness.Report, options: argparse.Namespace, directory: str) -> None:
    shape = Shape(FEATURES, options.batch, options.rows)
    hot_rows = int(FEATURES * options.rows / options.times)
    every, warmup = options.steps, options.warmup * options.steps
    stores = {
        '["dram"]': StoreOptions(shards=options.shards),
        '["dram", "ssd"]': StoreOptions(
            shards=options.shards,
            tiers=("dram", "ssd"),
            hot_rows=hot_rows,
            warm_up_steps=max(1, warmup // 2),
            flush_every_steps=every,
            ssd_dir=directory,
        ),
    }
    batches = make_batches(shape, every * (options.warmup + options.rounds), options.zipf)
    sides = {}
    for name, store in stores.items():
        print(f"fills {FEATURES * options.rows:,} rows: {name}", file=sys.stderr, flush=True)
        sides[name] = Girih(Task("dlrm", options.dim, shape), options.shards, store)
    read = dict.fromkeys(sides, 0)
    before: dict[str, dict[str, int]] = {}

    def contestant(name: str) -> harness.Contestant:
        def turn(number: int) -> tuple[float]:
            if number == options.warmup:
                before[name] = dict(sides[name].sparse.stats().store)
            part = batches[number * every : (number + 1) * every]
            start = device_bytes()
            seconds = harness.seconds(lambda: train(sides[name], part))
            read[name] += (device_bytes() - start) * (number >= options.warmup)
            return (seconds / every,)

        return turn

    measured = harness.alternate({name: contestant(name) for name in sides}, options.rounds, options.warmup)
    row_bytes = 4 * next(store for _, store in sides['["dram"]'].sparse.stores()).state.layout.num_words
    table = report.table(
        f"{FEATURES * options.rows:,} rows of {row_bytes} bytes, {hot_rows:,} of them hot",
        {
            "tiers": "{}", "samples/s": "{:,.0f}", "of all in memory": "{:.2f}×", "rows in memory": "{:,}", "hits": "{:.1%}", "by frequency": "{:.1%}",
            "known beforehand": "{:.1%}", "bytes read from the device": "{:,}", "per step": "{:,.0f}",
        },
    )  # fmt: skip
    num_steps = options.rounds * every
    for name, side in sides.items():
        row = {
            "tiers": name,
            "samples/s": options.batch / harness.median(measured[name]),
            "of all in memory": harness.ratio(measured[name], measured['["dram"]']),
            "bytes read from the device": read[name],
            "per step": read[name] / num_steps,
        }
        after = side.sparse.stats().store
        if "ssd_reads" in after:
            hits, misses = (after[f"{t}_reads"] - before[name][f"{t}_reads"] for t in ("dram", "ssd"))
            rows = num_slots(side)
            row |= {"rows in memory": rows, "hits": hits / (hits + misses)}
            row["by frequency"] = expected_ratio(options, rows)
            row["known beforehand"] = best_ratio(batches[warmup:], rows)
        table.row(row)
        side.close()


def train(side: Girih, batches: list[Batch]) -> None:
    """Steps as a trainer takes them; the rows of the next batch are asked for before this one is computed."""
    dense, sparse = side._dense[side.precision], side.sparse
    prepared = sparse.prepare(batches[0])
    for batch, after in zip(batches, [*batches[1:], None], strict=True):
        pulled = sparse.pull(batch, prepared)
        if after is not None:
            prepared = sparse.prepare(after)
        computed = dense.compute(batch, pulled.wait())
        pulled.push(sparse.last_step + 1, 1.0, computed.vote)
        computed.apply(computed.vote)


def num_slots(side: Girih) -> int:
    """Rows that memory has room for, of a side with tiers."""
    states = [store.state for _, store in side.sparse.stores()]
    values = [state.values for state in states if isinstance(state, ShardState)]
    return sum(of_one.slots.num_slots for of_one in values if isinstance(of_one, TieredValues))


def expected_ratio(options: argparse.Namespace, num_rows: int) -> float:
    """The share of reads, one for each key of a batch, that the ``num_rows`` most frequent keys are expected to have.

    An id is Zipf's with exponent s, modulo R rows, so that id i has probability R^-s ζ(s, (i + 1) / R) / ζ(s), by Hurwitz's ζ.
    """
    rank, s = np.arange(1, options.rows + 1) / options.rows, options.zipf
    probability = options.rows**-s * zeta(s, rank) / zeta(s)
    in_batch = 1 - (1 - probability) ** options.batch
    return float(in_batch[: num_rows // FEATURES].sum() / in_batch.sum())


def best_ratio(batches: list[Batch], num_rows: int) -> float:
    """The share of reads, one for each key of a batch, of the ``num_rows`` keys that are read most."""
    reads: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        for feature, ids in enumerate(batch.ids.reshape(FEATURES, -1)):
            reads.update((feature, key) for key in np.unique(ids).tolist())
    return sum(count for _, count in reads.most_common(num_rows)) / max(1, reads.total())


def device_bytes() -> int:
    """Bytes that this process has read from disks so far, as the system counts them."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    return 0


GOAL, BLOCK_BYTES = 0.5, 4096


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    memory, tiered = (pages.row(results, "", tiers=tiers) for tiers in ('["dram"]', '["dram", "ssd"]'))
    if not tiered:
        return {"speed": None}
    of_memory, per_step = tiered.get("of all in memory"), tiered.get("per step")
    verdict = "" if of_memory is None else f"The goal is {GOAL}. "
    if of_memory is not None:
        verdict += "It is met." if of_memory >= GOAL else f"It is missed by {GOAL - of_memory:.3f}."
    hits = [
        pages.shown(tiered.get(name), "{:.1%}").replace("%", " %")
        for name in ("hits", "by frequency", "known beforehand")
    ]
    return {
        "speed": pages.sentences(
            f"{pages.measured(results)}. The tables have {results['tables'][0]['title']}.",
            f"girih trains on {pages.shown(tiered.get('samples/s'), '{:,.0f}')} samples/s, and on"
            f" {pages.shown(memory.get('samples/s'), '{:,.0f}')} with all rows in memory: {pages.shown(of_memory, '{:.3f}')} of the speed.",
            verdict,
            f"Memory has {pages.shown(tiered.get('rows in memory'), '{:,}')} rows and answers {hits[0]} of the reads.",
            f"With the most frequent rows it would answer {hits[1]}, and {hits[2]} if the batches were known in advance.",
            f"Each step reads {pages.shown(per_step, '{:.1f}', 1e-6)} MB from the device:"
            f" {pages.shown(per_step, '{:,.0f}', 1 / BLOCK_BYTES)} blocks of 4 KiB.",
        )
    }


if __name__ == "__main__":
    main()

"""Persia's load balance (§4.2.3): keys of every feature group shuffled over the servers, beside whole groups on a server.

A count, which needs no timing: the batches of real data, cut into trainers' shares, go through the embedding worker's
own router. ``shuffled`` is what it does, each key hashed to a server; the baselines have each table (a feature group) whole
on one server: table t on server t mod N, or placed by the load of the first ``--known`` steps, heaviest first, and kept. ``most / mean`` is
the busiest server over the mean: what the others wait for. Generated data have 26 tables of 10 to 10 million ids, drawn by
Zipf's law, two of them bags of ten; KuaiRand is read in the order of time, as in online training.

    GIRIH_DATA=... girih bench persia_balance
    girih bench persia_balance --data generated
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
from experiments import find_data
from numpy.typing import NDArray
from strategy_quality import CASES

from girih.app.run_config import RunConfig
from girih.data.batch import share_of
from girih.planner.placement import Placement, balanced, modulo
from girih.sparse.routing.key_router import KeyRouter
from girih.strategies.remote import RemoteStrategy
from girih.training.specs import sparse_spec

TABLES, BAGS, BAG = 26, 2, 10
SMALLEST, LARGEST, ZIPF = 10, 10_000_000, 1.1
KEY_BYTES = 12
"""A key and how often it occurs, as a worker sends them."""


def main() -> None:
    parser = harness.parser("persia_balance", __doc__)
    parser.add_argument(
        "--data", nargs="+", default=["generated", "kuairand"], choices=["generated", "kuairand"]
    )
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024, help="examples of all trainers")
    parser.add_argument("--steps", type=int, default=200, help="at most, or those of one epoch")
    parser.add_argument("--known", type=int, default=20, help="steps that the placement by load is made from")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.known, options.batch = 4, 2, 256
    report = harness.Report("persia_balance", options)
    table = report.table(
        f"keys that {options.servers} servers are asked for",
        {"data": "{}", "placement": "{}", "steps": "{}", "keys a step": "{:,.0f}", "MB a step": "{:.2f}",
         "share of each server": "{}", "most / mean": "{:.3f}", "of a step: median": "{:.3f}", "99 %": "{:.3f}"},
    )  # fmt: skip
    for name in options.data:
        if name == "kuairand" and "GIRIH_DATA" not in os.environ and "KUAIRAND" not in os.environ:
            report.skip(name, "set GIRIH_DATA to the directory of the public data sets")
            continue
        if name == "kuairand":
            find_data(parser)
        with tempfile.TemporaryDirectory() as directory:
            settings = _settings(name, options, Path(directory))
            shuffled, of_tables = counted(settings, options.steps)
        for placement, keys in placed(settings, shuffled, of_tables, options.known).items():
            table.row({"data": name, "placement": placement, **_row(keys, row_bytes(settings))})
    report.not_identical(
        f"the placement by load is not asked about the {options.known} steps that it is made from; shuffled keys and "
        "table t on server t mod N are"
    )
    report.finish()


Counts = NDArray[np.int64]


def counted(settings: RunConfig, steps: int) -> tuple[Counts, dict[str, Counts]]:
    """Keys that servers are asked for in each step, all trainers together, by the worker's router.

    Returns:
        int64[steps, S] of servers; table name → int64[steps].
    """
    strategy = settings.strategy
    assert isinstance(strategy, RemoteStrategy)
    num_servers, trainers = strategy.embedding_servers, strategy.trainers
    spec = sparse_spec(
        settings.model(), settings.schema, settings.train, settings.store, settings.sparse_optimizer, None
    )
    groups = spec.groups()
    routers = [KeyRouter(group, num_servers, 1) for group in groups]
    of_servers: list[Counts] = []
    of_tables: dict[str, list[int]] = {table.name: [] for group in groups for table in group.spec.tables}
    for number, batch in enumerate(_batches(settings)):
        if number == steps:
            break
        asked_of, by_table = np.zeros(num_servers, np.int64), dict.fromkeys(of_tables, 0)
        for trainer in range(trainers):
            share = share_of(batch, trainer, trainers)
            for group, router in zip(groups, routers, strict=True):
                asked = router.ask(share)
                for server in range(num_servers):
                    lengths, keys, _ = asked.of_place(server)
                    asked_of[server] += len(keys)
                    for table, length in zip(group.spec.tables, lengths, strict=True):
                        by_table[table.name] += int(length)
        of_servers.append(asked_of)
        for name, count in by_table.items():
            of_tables[name].append(count)
    return np.array(of_servers), {name: np.array(counts) for name, counts in of_tables.items()}


def _batches(settings: RunConfig) -> Iterator[Any]:
    for batch, _ in settings.dataset("train").in_order().batches(0):
        yield batch


def placed(
    settings: RunConfig, shuffled: Counts, of_tables: Mapping[str, Counts], known: int
) -> dict[str, Counts]:
    """Name of a placement → int64[steps, S], keys that servers are asked for."""
    num_servers = shuffled.shape[1]
    loads = {name: float(counts[:known].sum()) for name, counts in of_tables.items()}
    return {
        "shuffled": shuffled,
        "tables, t mod N": _by_table(modulo(settings.schema, num_servers), settings, of_tables, num_servers),
        "tables, by load": _by_table(
            balanced(settings.schema, num_servers, loads), settings, of_tables, num_servers
        )[known:],
    }


def _by_table(
    placement: Placement, settings: RunConfig, of_tables: Mapping[str, Counts], num_servers: int
) -> Counts:
    server_of = {feature.table_name: placement.owners[feature.name] for feature in settings.schema.sparse}
    found = np.zeros((len(next(iter(of_tables.values()))), num_servers), np.int64)
    for name, counts in of_tables.items():
        found[:, server_of[name]] += counts
    return found


def row_bytes(settings: RunConfig) -> int:
    """What a key costs its server's link: the key, its row and the row's gradient; of the first table, as all are alike."""
    return KEY_BYTES + 2 * 4 * settings.schema.tables[0].dim


def _row(keys: Counts, bytes_of_key: int) -> dict[str, Any]:
    of_server, of_step = keys.sum(0), keys.max(1) / keys.mean(1)
    return {
        "steps": len(keys),
        "keys a step": float(keys.sum(1).mean()),
        "MB a step": float(keys.sum(1).mean()) * bytes_of_key / 1e6,
        "share of each server": " ".join(f"{share:.3f}" for share in of_server / of_server.sum()),
        "most / mean": float(of_server.max() / of_server.mean()),
        "of a step: median": float(np.median(of_step)),
        "99 %": float(np.quantile(of_step, 0.99)),
    }


def _settings(name: str, options: argparse.Namespace, directory: Path) -> RunConfig:
    config = _generated(options, directory) if name == "generated" else _kuairand()
    config["data"]["batch_size"] = options.batch
    config["strategy"] = {
        "name": "hybrid",
        "trainers": options.trainers,
        "embedding_servers": options.servers,
    }
    file = directory / "config.toml"
    file.write_text(tomli_w.dumps(config))
    return RunConfig.load(file)


def _kuairand() -> dict[str, Any]:
    case = CASES["kuairand/dnn"]
    return case.config(case.arms["one process"], 1.0, 1, quick=False)


def _generated(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Tables whose sizes are as far apart as in click logs."""
    rng, rows = np.random.default_rng(0), options.batch * options.steps
    sizes = np.geomspace(SMALLEST, LARGEST, TABLES).astype(np.int64)
    columns: dict[str, Any] = {}
    for place, size in enumerate(sizes):
        bag = BAG if place >= TABLES - BAGS else 1
        drawn = pa.array(rng.zipf(ZIPF, rows * bag) % size)
        if bag > 1:
            drawn = pa.ListArray.from_arrays(pa.array(np.arange(0, rows * bag + 1, bag, np.int32)), drawn)
        columns[f"c{place}"] = drawn
    columns["click"] = (rng.random(rows) < 0.25).astype(np.int8)
    pq.write_table(pa.table(columns), directory / "train.parquet")
    return {
        "data": {"train": str(directory / "train.parquet")},
        "features": [{"name": f"c{place}", "kind": "categorical", "dim": 16} for place in range(TABLES)],
        "labels": {"names": ["click"]},
        "model": {"name": "dnn", "hidden": [8]},
    }


if __name__ == "__main__":
    main()

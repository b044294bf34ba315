"""Whether two versions train the same, bit for bit: losses, dense parameters and rows of many small runs.

    python benchmarks/identical.py record TREE before.json      # what the version in TREE/src trains
    python benchmarks/identical.py compare before.json after.json

``record`` runs ``python -m girih train`` with ``TREE/src`` in front of the path, one case at a time: two data sets
below ``GIRIH_DATA``, every strategy that promises equal results, four sparse optimizers, and some extra cases:
strategies that repeat themselves with one process of each role, two tiers, and answers of ``girih serve``. It keeps
the loss of each step as Python writes it, and a SHA-256 of each dense tensor (parameters, the optimizer's state, the
random state) and of each column of each table (ids, weights, the optimizer's state), rows sorted by id. When a row was
used last and how often is left out, and so is which shard it lay in. ``compare`` tells for each case whether all of it
is equal, and where it differs first; status 1 if any case differs, or is in one file only.

What versions must have in common: the command line, the keys of docs/config.md, ``loss`` in ``metrics.jsonl``, and the
files of a checkpoint. What is assumed of those stands in the last section below; a version that lays them out
otherwise needs a change there, and nowhere else. Tensors and tables are known by name: one renamed is told as missing.

Both records must come from one machine and one environment: another CPU or PyTorch rounds otherwise. Threads, shards
and the way ``substitution`` computes the dense half are fixed, as results may depend on them (another version may
decide ``dense = "auto"`` otherwise). The first run of a version compiles its kernels, which takes half a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tomli_w
import torch
from safetensors import safe_open
from torch import Tensor

Config = dict[str, Any]
Record = dict[str, Any]
"""One case: ``losses``, ``dense``, ``tables`` and perhaps ``answers``; the latter three are flat: name → digest or text."""

STEPS, BATCH_SIZE, DIM, SEED, SHARDS = 200, 512, 8, 7, 2
LIMIT_S = 600
"""A run that takes longer hangs."""

STRATEGIES: dict[str, Config] = {
    "local": {"name": "local"},
    "synchronous": {"name": "synchronous", "trainers": 2},
    "substitution": {"name": "substitution", "trainers": 2, "dense": "replicated"},
    "hybrid": {"name": "hybrid", "trainers": 2, "embedding_servers": 2, "staleness": 0},
}
ALONE: dict[str, Config] = {
    "asynchronous": {"trainers": 1, "embedding_servers": 1, "staleness": 0},
    "hierarchical": {"trainers_per_group": 1, "servers_per_group": 1, "embedding_servers": 1, "nets": 1},
}
"""One process of each role: then nothing depends on who comes first."""
NUM_REQUESTS, CANDIDATES = 20, 64
OPTIMIZERS: dict[str, Config] = {
    "adagrad": {"name": "adagrad", "lr": 0.05, "l2": 1e-4},
    "rowwise_adagrad": {"name": "rowwise_adagrad", "lr": 0.05, "l2": 1e-4},
    "adam": {"name": "adam", "lr": 2e-3, "l2": 1e-4},
    "ftrl": {"name": "ftrl", "lr": 0.1, "l1": 1e-3, "l2": 1e-4},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training.

    Attributes:
        data: "frappe" or "kuairand".
        sections: of the config, laid over those that all cases share.
        served: whether ``girih serve`` answers requests from the run as well.
    """

    name: str
    data: str
    sections: Mapping[str, Any] = field(default_factory=dict)
    served: bool = False

    def config(self, folder: Path, steps: int) -> Config:
        """The config file's content; ``folder`` holds ``train.parquet`` of this data set."""
        shared: Config = {
            "data": {"train": str(folder / "train.parquet"), "format": "parquet", "batch_size": BATCH_SIZE},
            "features": FEATURES[self.data],
            "labels": {"names": ["label" if self.data == "frappe" else "is_click"]},
            "model": {"name": "deepfm", "hidden": [64, 32], "dropout": 0.0},
            "dense_optimizer": {"name": "adam", "lr": 1e-3},
            "train": {"epochs": 10, "max_steps": steps, "log_every_steps": 1, "seed": SEED},
            "store": {"shards": SHARDS},
        }
        for name, section in self.sections.items():
            merged = isinstance(section, Mapping) and name in shared
            shared[name] = {**shared[name], **section} if merged else section
        return shared


def cases() -> list[Case]:
    """All of them; names are ``data/strategy/optimizer``, or ``data/what is special``."""
    grid = [
        Case(f"{data}/{strategy}/{optimizer}", data, {"strategy": options, "sparse_optimizer": rule})
        for data in FEATURES
        for strategy, options in STRATEGIES.items()
        for optimizer, rule in OPTIMIZERS.items()
    ]
    split = Case(
        "kuairand/substitution-split",
        "kuairand",
        {
            "strategy": {**STRATEGIES["substitution"], "dense": "split"},
            "sparse_optimizer": OPTIMIZERS["adam"],
            "train": {"clip_norm": 0.1},
        },
    )
    eviction = Case(
        "kuairand/dropout-eviction",
        "kuairand",
        {
            "strategy": STRATEGIES["local"],
            "sparse_optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "model": {"dropout": 0.2},
            "train": {"clip_norm": 0.1},
            "tables": [
                {"name": "user_id", "eviction": {"name": "lru", "max_rows": 1500}},
                {"name": "author_id", "eviction": {"name": "lru", "max_rows": 1200}, "dtype": "bfloat16"},
            ],
        },
    )
    alone = [
        Case(f"kuairand/{name}-alone", "kuairand", {"strategy": {"name": name, **options}})
        for name, options in ALONE.items()
    ]
    tiers = Case(
        "kuairand/tiers",
        "kuairand",
        {
            "strategy": STRATEGIES["local"],
            "store": {
                "tiers": ["dram", "ssd"],
                "hot_rows": 2_000,
                "flush_every_steps": 20,
                "warm_up_steps": 20,
            },
        },
    )
    served = [
        Case(f"{data}/served", data, {"strategy": STRATEGIES["local"]}, served=True) for data in FEATURES
    ]
    return [*grid, split, eviction, *alone, tiers, *served]


# --- data -----------------------------------------------------------------------------------------------------------


def _categorical(name: str, **options: Any) -> Config:
    return {"name": name, "kind": "categorical", "dim": DIM, **options}


def _numeric(name: str) -> Config:
    return {"name": name, "kind": "numeric", "transform": ["log1p", "standardize"]}


FEATURES: dict[str, list[Config]] = {
    "frappe": [
        _categorical(name)
        for name in (
            "user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city",
        )
    ],
    "kuairand": [
        _categorical("user_id"),
        _categorical("video_id"),
        _categorical("author_id"),
        _categorical("tab"),
        _categorical("tag"),  # a list of ids
        _categorical("fans_user_num", bucketize=[1.0, 10.0, 100.0, 1000.0]),
        {"name": "watch_seq", "kind": "sequence", "table": "video_id", "max_length": 20},
        _numeric("duration_ms"),
        _numeric("follow_user_num"),
        _numeric("register_days"),
    ],
}  # fmt: skip


def data_folder(data: str, source: Path, work: Path) -> Path:
    """Where ``train.parquet`` of a data set lies; KuaiRand's is joined first, once, into ``work``."""
    if data == "frappe":
        return source / "frappe_x1"
    folder = work / "kuairand"
    if not folder.exists():
        folder.mkdir()
        pq.write_table(_kuairand(source / "kuairand_pure"), folder / "train.parquet", row_group_size=50_000)
    return folder


def _kuairand(source: Path) -> pa.Table:
    """The log, with some columns of the user, of the video and of what the user watched before."""
    log = pq.read_table(
        source / "train.parquet", columns=["user_id", "video_id", "is_click", "duration_ms", "tab"]
    )
    for file, key, names in (
        ("user_features", "user_id", ["fans_user_num", "follow_user_num", "register_days"]),
        ("video_features_basic", "video_id", ["author_id", "tag"]),
        ("user_history_until_0424", "user_id", ["watch_seq"]),
    ):
        found = pq.read_table(source / f"{file}.parquet", columns=[key, *names])
        rows = pc.index_in(log[key].combine_chunks(), value_set=found[key].combine_chunks())
        for name in names:
            log = log.append_column(name, found[name].combine_chunks().take(rows))
    return log


# --- recording ------------------------------------------------------------------------------------------------------


class RunFailed(Exception):
    """A run that did not end well, with what it said."""


def record(tree: Path, chosen: Sequence[Case], steps: int) -> tuple[dict[str, Record], list[str]]:
    """Trains the cases, one after the other; returns the records and the names of those that failed."""
    environment = _environment(tree)
    source = Path(os.environ.get("GIRIH_DATA", "../shared/data")).resolve()
    records: dict[str, Record] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="identical-") as work:
        for case in chosen:
            start = time.perf_counter()
            try:
                folder = data_folder(case.data, source, Path(work))
                with tempfile.TemporaryDirectory(dir=work) as place:
                    config = case.config(folder, steps)
                    run = train(config, Path(place), environment)
                    records[case.name] = read_run(run, steps)
                    if case.served:
                        records[case.name]["answers"] = answers(run, config, environment)
            except RunFailed as error:
                failed.append(case.name)
                print(f"{case.name}: FAILED\n{error}", file=sys.stderr, flush=True)
            else:
                print(f"{case.name:42} {time.perf_counter() - start:5.1f} s", flush=True)
    return records, failed


def train(config: Config, place: Path, environment: Mapping[str, str]) -> Path:
    """Runs ``girih train`` in an empty directory and returns the run's.

    Raises:
        RunFailed: it ended with another status than 0, or not at all.
    """
    (place / "config.toml").write_bytes(tomli_w.dumps(config).encode())
    command = [sys.executable, "-m", "girih", "train", "config.toml", "--run", "run"]
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"it was ended after {LIMIT_S} s\n{_text(error.stderr)}") from None
    if done.returncode != 0:
        raise RunFailed(f"status {done.returncode}\n{done.stderr}")
    return place / "run"


def answers(run: Path, config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """What ``girih serve`` answers to requests of examples from the training data, by the request's number.

    Raises:
        RunFailed: the server does not start or refuses a request.
    """
    command = [sys.executable, "-m", "girih", "serve", str(run), "--port", "0", "--name", "model"]
    with tempfile.TemporaryFile() as errors:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            address = None
            while address is None:
                line = server.stdout.readline()  # type: ignore[union-attr]
                if not line:
                    errors.seek(0)
                    raise RunFailed(f"the server ended\n{_text(errors.read())}")
                address = re.search(r"http://[0-9.]+:\d+", line)
            url = f"{address.group()}/v2/models/model/infer"
            return {str(number): _answer(url, body) for number, body in enumerate(_requests(config))}
        finally:
            server.terminate()
            server.communicate(timeout=LIMIT_S)


def _requests(config: Config) -> Iterator[bytes]:
    names = [feature["name"] for feature in config["features"]]
    with pq.ParquetFile(config["data"]["train"]) as file:
        batches = file.iter_batches(batch_size=CANDIDATES, columns=names)
        for batch in itertools.islice(batches, NUM_REQUESTS):
            inputs = [tensor for name in names for tensor in _tensors(name, batch[name])]
            yield json.dumps({"inputs": inputs}).encode()


def _tensors(name: str, column: pa.Array) -> Iterator[dict[str, object]]:
    """One input of a request. Lists are their values, then their lengths."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
        yield {"name": f"{name}.lengths", "datatype": "INT32", "shape": [len(lengths)], "data": lengths}
        column = pc.list_flatten(column)
    kind = (
        "INT64"
        if pa.types.is_integer(column.type)
        else "FP64"
        if pa.types.is_floating(column.type)
        else "BYTES"
    )
    yield {"name": name, "datatype": kind, "shape": [len(column)], "data": column.to_pylist()}


def _answer(url: str, body: bytes) -> str:
    """The outputs of an answer as text."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.dumps(json.load(answer)["outputs"])
    except urllib.error.HTTPError as error:
        raise RunFailed(f"{error.code}: {error.read().decode(errors='replace')}") from None


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _environment(tree: Path) -> dict[str, str]:
    """What runs see: the tree's own package before any other, and one thread for each process's dense half.

    Raises:
        SystemExit: Python finds another girih than the tree's.
    """
    source = (tree / "src").resolve()
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import girih; print(girih.__file__)"]
    # Not where this was started: Python looks into the current directory first.
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not Path(done.stdout.strip()).resolve().is_relative_to(source):
        raise SystemExit(f"{source}: girih is not imported from there: {done.stdout.strip() or done.stderr}")
    return environment


def made_with(tree: Path, steps: int) -> dict[str, Any]:
    """What is good to know about a record; ``compare`` shows where it differs."""
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit or None,
        "steps": steps,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores",
    }


# --- comparing ------------------------------------------------------------------------------------------------------


def difference(before: Record, after: Record) -> str | None:
    """Where two records of a case differ first, in the order of training: loss, dense, tables, answers. None: nowhere."""
    told = [
        _loss_difference(before["losses"], after["losses"]),
        _names_difference("dense tensor", _of_trainer_0(before["dense"]), _of_trainer_0(after["dense"])),
        _names_difference("table column", before["tables"], after["tables"]),
        _names_difference("answer", before.get("answers", {}), after.get("answers", {})),
    ]
    return "; ".join(text for text in told if text is not None) or None


def _of_trainer_0(dense: Mapping[str, str]) -> dict[str, str]:
    """The digests, with the random state of trainer 0 alone, by one name: checkpoints of format 1 had no other."""
    others = {name for name in dense if name.startswith("random.") and not name.startswith("random.0.")}
    return {
        {"state.random": "random.0.cpu"}.get(name, name): digest
        for name, digest in dense.items()
        if name not in others
    }


def _loss_difference(before: Sequence[str], after: Sequence[str]) -> str | None:
    for step, (one, other) in enumerate(zip(before, after, strict=False), 1):
        if one != other:
            return f"loss from step {step}: {one}, now {other}"
    return None if len(before) == len(after) else f"{len(before)} steps, now {len(after)}"


def _names_difference(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    if not names:
        return None
    first = names[0]
    how = "is gone" if first not in after else "is new" if first not in before else "differs"
    more = f" (and {len(names) - 1} more of {len(before)})" if len(names) > 1 else ""
    return f"{what} {first} {how}{more}"


def compare(before: Mapping[str, Any], after: Mapping[str, Any], only: str) -> bool:
    """Prints a line a case; returns whether all are equal."""
    for key in sorted(before["made_with"].keys() | after["made_with"].keys()):
        one, other = before["made_with"].get(key), after["made_with"].get(key)
        if one != other:
            print(f"{key}: {one}, now {other}")
    names = [name for name in {**before["cases"], **after["cases"]} if only in name]
    num_equal = 0
    for name in names:
        if name not in before["cases"] or name not in after["cases"]:
            told: str | None = f"only in the {'first' if name in before['cases'] else 'second'} file"
        else:
            told = difference(before["cases"][name], after["cases"][name])
        num_equal += told is None
        print(f"{name:42} {'equal' if told is None else f'DIFFERS: {told}'}")
    print(f"{num_equal} of {len(names)} cases are equal")
    return num_equal == len(names) > 0


# --- what is read of a run: the only section that knows how its files are laid out ---------------------------------

NOT_COMPARED = ("ids", "tables", "last_used", "counts", "versions", "rows", "newer")
"""Columns of a shard that say where or when, not what; ids are kept under the table's name."""


def read_run(run: Path, steps: int) -> Record:
    """The record of a run's directory.

    Raises:
        RunFailed: a step's loss or the checkpoint is missing.
    """
    losses = _losses(run / "metrics.jsonl")
    if len(losses) != steps:
        raise RunFailed(f"{len(losses)} losses in metrics.jsonl, expected {steps}")
    checkpoint = _last_checkpoint(run)
    return {
        "losses": losses,
        "dense": _dense_digests(checkpoint / "dense.safetensors"),
        "tables": _table_digests(sorted(checkpoint.glob("tables/**/shard-*.safetensors"))),
    }


def _losses(path: Path) -> list[str]:
    """A record without ``split`` is one of training, here of one step each."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [repr(record["loss"]) for record in records if "split" not in record]


def _last_checkpoint(run: Path) -> Path:
    """The directory that holds ``dense.safetensors``; of several the last by name, which is the latest step's."""
    found = sorted(path.parent for path in run.glob("**/dense.safetensors"))
    if not found:
        raise RunFailed("the run left no dense.safetensors")
    return found[-1]


def _dense_digests(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: _digest(file.get_tensor(name)) for name in sorted(file.keys())}


def _table_digests(shards: Sequence[Path]) -> dict[str, str]:
    """A digest for ``<table>.<column>``, of all rows of a table sorted by id, whatever shard they lie in."""
    parts: dict[str, list[dict[str, Tensor]]] = {}
    for shard in shards:
        for table, columns in _tables_in(shard):
            parts.setdefault(table, []).append(columns)
    if not parts:
        raise RunFailed("the checkpoint has no rows in tables/**/shard-*.safetensors")
    digests = {}
    for table, pieces in sorted(parts.items()):
        whole = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        order = torch.argsort(whole["ids"], stable=True)
        for name, column in whole.items():
            digests[f"{table}.{name}"] = _digest(column[order])
    return digests


def _tables_in(shard: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(table's name, its columns, ``ids`` among them) of one file.

    Assumed: a file holds the rows of several tables; ``ids`` and ``tables`` give each row's id and the number of its
    table; the numbers count the ``tables`` of the JSON text ``girih`` in the file's header, which have a ``name``. Any
    other tensor is a column, one entry a row, but for Bloom filters, and for what ``NOT_COMPARED`` lists.
    """
    with safe_open(shard, framework="pt") as file:
        names = [table["name"] for table in json.loads(file.metadata()["girih"])["tables"]]
        numbers, ids = file.get_tensor("tables"), file.get_tensor("ids")
        columns = {
            name: file.get_tensor(name)
            for name in sorted(file.keys())
            if name not in NOT_COMPARED and not name.startswith("bloom.")
        }
    for number, table in enumerate(names):
        rows = numbers == number
        yield table, {"ids": ids[rows], **{name: column[rows] for name, column in columns.items()}}


def _digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes; a tensor's name is its key in the record."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- the command line -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train all cases with the version in TREE")
    recording.add_argument("tree", metavar="TREE", type=Path, help="a checkout; its src/ is what runs")
    recording.add_argument("out", metavar="OUT.json", type=Path)
    recording.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    comparing = commands.add_parser("compare", help="tell where two records differ")
    comparing.add_argument("before", metavar="BEFORE.json", type=Path)
    comparing.add_argument("after", metavar="AFTER.json", type=Path)
    for command in (recording, comparing):
        command.add_argument("--only", metavar="SUBSTRING", default="", help="cases whose name contains it")
    options = parser.parse_args()
    if options.command == "compare":
        before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
        sys.exit(0 if compare(before, after, options.only) else 1)
    chosen = [case for case in cases() if options.only in case.name]
    if not chosen:
        raise SystemExit(f"--only {options.only}: no such case; names are like {cases()[0].name}")
    records, failed = record(options.tree, chosen, options.steps)
    content = {"made_with": made_with(options.tree, options.steps), "cases": records}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

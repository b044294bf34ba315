"""PICASSO's Table V: operations of one training step, a table an operation and packed, on models of 204, 364 and 94 features.

What is counted, of one step whose kernels are compiled and whose rows are there:

- operators: calls of ``aten`` operators that no other one makes, from ``torch.profiler``, backward pass and optimizers
  included; without those that only look at memory otherwise or allocate it (views, ``empty``, ``detach``);
- kernels: calls from Python of entry points of ``girih.kernels.cpu``, with one shard;
- collectives: calls of the trainers' group, which a step of several trainers waits for.

"plain PyTorch" is what a user writes without girih (``plain_torch.py``): an ``nn.EmbeddingBag`` a feature, ``torch.cat``,
Adagrad for tables and Adam for the network. The others are ``synchronous``. Counts do not depend on the machine; batches are small.

    girih bench picasso_table5 --json docs/results/picasso-table5.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import phases
import picasso
import plain_torch
import tomli_w
import torch
from experiments import show
from torch.profiler import ProfilerActivity, profile

from girih.app.run_config import RunConfig
from girih.comm.group import TrainerGroup
from girih.kernels.cpu.jit import KERNELS
from girih.telemetry.stats import Spans
from girih.training.schedules import JoinedHalves

PAPER = {"W&D": (100_039, 14_882, 16), "CAN": (381_364, 67_985, 19), "MMoE": (300_524, 75_217, 11)}
"""Operations of the baseline and of PICASSO, and packed embeddings."""
NO_WORK = frozenset(
    f"aten::{name}" for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "expand_as", "flatten", "narrow",
        "new_empty", "new_empty_strided", "permute", "reshape", "resize_", "select", "slice", "split", "split_with_sizes",
        "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "_unsafe_view", "chunk",
        "is_nonzero", "set_", "_reshape_alias", "numpy_T", "lift_fresh", "result_type",
    )
)  # fmt: skip
"""Operators that move no data of a step."""
WARM, BATCHES = 2, 4
STEPS = {
    "unpacked": {"packing": False},
    "packed": {},
    "packed, 4 interleaving groups": {"interleaving_groups": 4},
    "packed, 4 interleaving groups, 2 micro-batches": {"interleaving_groups": 4, "micro_batches": 2},
}
MODULES = "girih."


def main() -> None:
    parser = harness.parser("picasso_table5", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a twentieth of the features: shows that it runs"
    )
    parser.add_argument(
        "--workloads", nargs="+", default=list(picasso.WORKLOADS), choices=list(picasso.WORKLOADS)
    )
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=5, help="ids of a sequence")
    options = parser.parse_args()
    report = harness.Report("picasso_table5", options)
    rows = [row for name in options.workloads for row in _rows(name, options)]
    show(report, "operations of a step", list(rows[0]), [list(row.values()) for row in rows])
    report.not_identical(
        "the paper counts nodes of TensorFlow's graph, which stand for much smaller things; what can be compared is the ratio"
    )
    report.not_identical("plain PyTorch has static tables, and no collectives: it is one process")
    report.finish()


def _rows(name: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    workload = picasso.WORKLOADS[name].scaled(0.05 if options.quick else 1.0, options.length)
    train = picasso.write_epoch(workload, options.batch, BATCHES, distinct=1)
    config = picasso.config(workload, train, options.batch)
    found: dict[str, Counter[str]] = {"plain PyTorch": _counted_plain(config)}
    for step in options.steps:
        found[step] = counted(config | {"schedule": STEPS[step]})
    before, after, packed = PAPER[name]
    paper = {"unpacked": f"{before:,}", "packed": f"{after:,} ({after / before:.1%})"}
    paper_groups = {"unpacked": f"{workload.num_features}", "packed": f"{packed}"}
    for step, counts in found.items():
        whole = counts["operators"] + counts["kernels"]
        row = {"workload": name, "features": f"{workload.num_features}", "step": step}
        row |= {what: f"{counts[what]:,}" for what in ("operators", "kernels")} | {"both": f"{whole:,}"}
        for base in ("unpacked", "plain PyTorch"):
            of = found.get(base)
            row[f"of {base}"] = f"{whole / (of['operators'] + of['kernels']):.1%}" if of else ""
        own = found.get("unpacked")
        row["kernels, of unpacked"] = (
            f"{counts['kernels'] / own['kernels']:.1%}" if own and counts["kernels"] else ""
        )
        row |= {"collectives": f"{counts['collectives']:,}", "groups": f"{counts['groups'] or ''}"}
        row |= {"views and the like": f"{counts['views']:,}"}
        yield row | {"paper: operations": paper.get(step, ""), "paper: groups": paper_groups.get(step, "")}


def counted(config: Mapping[str, Any]) -> Counter[str]:
    """Operations of one step of girih, in this process: ``operators``, ``views``, ``kernels``, ``collectives``, ``groups``."""
    with _stepping(config) as (_, step):
        step()  # from here on all kernels are compiled
    calls: Counter[str] = Counter()
    with calls_counted(calls), _stepping(config) as (num_groups, step):
        calls.clear()
        found = operators_of(step)
        return found + calls + Counter(groups=num_groups)


@contextmanager
def _stepping(config: Mapping[str, Any]) -> Iterator[tuple[int, Callable[[], object]]]:
    """The number of embedding groups, and a step that some others came before and one comes after."""
    store = {**config.get("store", {}), "shards": 1}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(tomli_w.dumps({**config, "store": store, "strategy": {"name": "synchronous"}}))
        settings = RunConfig.load(file)
        data = settings.dataset("train")
        batches = [(batch, None) for batch in itertools.islice(data, BATCHES)]
        with settings.trainer() as trainer:
            trainer.fit(data, epochs=0)
            plan, session = trainer._run.opened()
            halves = JoinedHalves(session.sparse, session.dense, 0, lambda: 1.0, Spans())
            steps = session.schedule(batches, halves)
            for _ in range(WARM):
                next(steps)
            yield len(plan.groups), lambda: next(steps)
            for _ in steps:
                pass


def _counted_plain(config: Mapping[str, Any]) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(tomli_w.dumps(config))
        batches = list(itertools.islice(RunConfig.load(file).dataset("train"), WARM + 1))
    plain = plain_torch.Plain(config)
    *earlier, last = map(plain.prepare, batches)
    for prepared in earlier:
        plain.step(prepared)
    return operators_of(lambda: plain.step(last))


def operators_of(step: Callable[[], object]) -> Counter[str]:
    """``operators`` that do work, and ``views`` that do none, of all that no other operator calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    found: Counter[str] = Counter()
    for event in profiler.events():
        if not event.name.startswith("aten::"):
            continue
        caller = event.cpu_parent
        while caller is not None and not caller.name.startswith("aten::"):
            caller = caller.cpu_parent
        if caller is None:
            found["views" if event.name in NO_WORK else "operators"] += 1
    return found


class _Counted:
    """A kernel that counts how often it is called from Python."""

    def __init__(self, dispatcher: Any, counts: Counter[str]) -> None:
        self._dispatcher, self._counts = dispatcher, counts

    def __call__(self, *arguments: Any) -> Any:
        self._counts["kernels"] += 1
        return self._dispatcher(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)


@contextmanager
def calls_counted(counts: Counter[str]) -> Iterator[None]:
    """Counts calls of kernels, wherever a module of girih names them, and of collectives."""
    counting = {id(kernel.dispatcher): _Counted(kernel.dispatcher, counts) for kernel in KERNELS.values()}
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, by: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, by)

    for module in [module for name, module in list(sys.modules.items()) if name.startswith(MODULES)]:
        for name, value in list(vars(module).items()):
            if id(value) in counting:
                replace(module, name, counting[id(value)])
    for name in phases.COLLECTIVES:
        replace(TrainerGroup, name, _collective(getattr(TrainerGroup, name), counts))
    try:
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)


def _collective(call: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def counting(*words: Any, **options: Any) -> Any:
        counts["collectives"] += 1
        return call(*words, **options)

    return counting


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Tables of the results in docs/results.

A file has tables. For a folder of runs, its benchmark prints its tables again: it trains and measures nothing, and needs no
data and no network.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
REDRAWN = {
    "des-table5": "des_table5",
    "hierarchical-quality/generated": "hierarchical_quality --data generated-decayed --counts 8 --groups 1 --parts nets trainers groups",
    "hierarchical-quality/kuairand": "hierarchical_quality --data kuairand --counts 2 4 --groups 1 2 --parts nets trainers groups",
    "hierarchical-quality/decayed": "hierarchical_quality --data kuairand-decayed --counts 4 --parts trainers",
    "hierarchical-quality/eight-bits": "hierarchical_quality --data kuairand --counts 4 --parts eight_bits",
    "persia-fig6": "persia_fig6 --rates 1gbit",
    "persia-fig9": "persia_fig9",
    "persia-theorem1": "persia_theorem1",
    "persia-wire/1gbit": "persia_wire --rounds 1 --rates 1gbit --compression-rates",
    "persia-wire/200mbit": "persia_wire --rounds 1 --rates 200mbit --staleness 0 4 8 16 --compressions none all",
    "picasso-fig15": "picasso_fig15 --rounds 1",
    "picasso-table3": "picasso_table3",
    "picasso-table4": "picasso_table4",
    "picasso-table6": "picasso_table6",
    "picasso-table7": "picasso_table7",
    "picasso-table8": "picasso_table8 --rounds 1",
    "strategy-quality": "strategy_quality --cases frappe/dnn kuairand/dnn kuairand/ffnn kuairand/lr kuairand/wide_deep kuairand/deepfm",
    "strategy-quality/one-rate": "strategy_quality --cases kuairand/dnn --factor 0.5",
    "stream": "stream --models lr",
}  # fmt: skip
"""Folders of runs, and the command that prints the tables of a page from them."""
RESULT_CORES = 2
"""Cores of the machines that made the results; this machine may have others."""
NOWHERE = ("GIRIH_DATA", "KUAIRAND", "KUAIRAND_DAYS", "MESH", "WIDE")


@cache
def tables(source):
    """The tables of ``docs/results/SOURCE``, as a benchmark's JSON has them: title, columns and rows."""
    file = RESULTS / source
    text = file.read_text(encoding="utf-8") if file.suffix == ".json" else _redrawn(source)
    return json.loads(text)["tables"]


def table(source, title):
    """The rows of the table of a source with this beginning of its title."""
    matching = [kept for kept in tables(source) if kept["title"].startswith(title)]
    titles = [kept["title"] for kept in tables(source)]
    assert len(matching) == 1, f"{source}: expected one table {title!r}, among {titles}"
    return matching[0]["rows"]


@cache
def benchmark(name):
    """A benchmark's module. Benchmarks import each other from their folder. A folder of tests may have the same name."""
    with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
        module = importlib.import_module(name)
        if module.__file__ is None:
            spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return module


def _redrawn(source):
    """The JSON that a benchmark writes from existing results."""
    name, *options = REDRAWN[source].split()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder, "tables.json")
        words = [name, *options, "--other-code", "--json", str(file)]
        module = benchmark(name)
        if hasattr(module, "pictures"):
            words += ["--docs", folder]
        for patch in _patches(module, Path(folder)):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(mock.patch.dict(os.environ, dict.fromkeys(NOWHERE, folder)))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        module.main()
        return file.read_text(encoding="utf-8")


def _patches(module, folder):
    """Keep a benchmark from data, networks and training. Its tables need none of them."""
    experiments, fleet, network, picasso, wide = map(
        benchmark, ("experiments", "fleet", "network", "picasso", "wide")
    )

    def refuse(kept, run, *words):
        raise AssertionError(f"no result is kept of {run.name}")

    yield mock.patch.object(fleet, "CORES", RESULT_CORES)
    yield mock.patch.object(os, "sched_getaffinity", return_value=set(range(RESULT_CORES)), create=True)
    yield mock.patch.object(network, "missing", return_value=None)
    yield mock.patch.object(
        experiments, "code", return_value="present"
    )  # takes seconds; results of all code count
    yield mock.patch.object(experiments.Results, "_trained", refuse)
    yield mock.patch.object(experiments.Results, "keep", refuse)
    yield mock.patch.object(wide, "link_epoch", return_value=None)
    yield mock.patch.object(picasso, "ROOT", folder)
    for name in ("find_data", "generate", "_write_data", "_split_days"):
        if hasattr(module, name):
            yield mock.patch.object(module, name, return_value=None)
    if module.__name__ == "picasso_table6":
        yield mock.patch.object(module, "trace_of", lambda config, *words: _trace(module, config))
    if module.__name__ == "hierarchical_quality":
        arms = module.arms
        yield mock.patch.object(module, "arms", lambda *words: _trained_arms(module, arms(*words)))


def _trace(module, config):
    """A trace with the right number of keys. Only the columns "best possible" need more, and the data."""
    keys = np.ones(36_965 if config["model"]["name"] == "din" else 1_189_774, np.int64)
    return module.Trace(keys, keys)


def _trained_arms(module, arms):
    """The arms without those of eight bits that were not trained."""
    folder = RESULTS / "hierarchical-quality" / "kuairand"
    trained = {path.name for path in folder.iterdir()}
    return {
        name: arm
        for name, arm in arms.items()
        if not name.endswith(module.BITS) or name.replace(",", "").replace(" ", "_") in trained
    }

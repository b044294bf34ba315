"""Every kernel that a step launches compiles to machine code for a GPU, whether one is here or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import girih
from girih.kernels.gpu import counting, dedup, gradients, index, jit, lookup, pool, records, routing, update
from girih.sparse.groups import gpu_group
from girih.store import Store
from girih.store.gpu.options import Gpu, GpuTier
from girih.tables import LRU, MinCount
from girih.testing.store_verbs import keys_of, two_segments

TYPES = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64"}
ALIKE = {"CHUNK_BITS": 6, "STRIDE": 32}  # of which one number compiles as another does
NUMBERS = {bool: "i1", int: "i32", float: "fp32"}
pytestmark = pytest.mark.skipif(not jit.INTERPRETED, reason="kernels are compiled by every other test here")


class Recorder:
    """Notes what is launched, each kind once, and launches it."""

    def __init__(self, launch):
        self.launch, self.found = launch, {}

    def __call__(self, kernel, num_items, block, *arguments, **options):
        names = kernel.arg_names
        types, values = {}, {}
        given = dict(zip(names, arguments, strict=False))
        given |= {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                types[name] = TYPES[value.dtype]
            elif value == 1 and name not in jit.VARYING:
                types[name], values[name] = "constexpr", 1
            else:
                types[name] = "i64" if value >= 2**31 else NUMBERS[type(value)]
        for name, value in {**options, "BLOCK": jit_block(block)}.items():
            if name not in given:
                types[name], values[name] = "constexpr", value
        values |= {name: number for name, number in ALIKE.items() if name in values}
        types = {name: types[name] for name in names}
        wanted = {
            "module": kernel.fn.__module__,
            "name": kernel.fn.__name__,
            "types": types,
            "values": values,
        }
        self.found[json.dumps(wanted, sort_keys=False)] = wanted
        self.launch(kernel, num_items, block, *arguments, **options)


def jit_block(block):
    """A program's items on a GPU, where the interpreter does more at a time."""
    return min(block, 256)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder(jit.launch)
    for module in (jit, dedup, gradients, counting, index, routing):
        monkeypatch.setattr(module, "launch", recorder)
    return recorder


def launches(optimizer, dtype, eviction=None, admission=None):
    """The verbs of a store and of a group."""
    from test_gpu_group import both, groups_of, run, some_batch

    (gpu, there), _ = both(groups_of(optimizer, dtype))
    for longest, weighted in ((1, False), (3, True), (40, False)):
        run(gpu, some_batch(longest, longest, weighted=weighted, num_examples=4), 1, np.random.default_rng(0))
        weighed = some_batch(longest, longest, weighted=True, num_examples=4)
        read, values = gpu.lookup_weighted(weighed, 1, train=False)
        gpu.weight_gradients(read, values, [torch.as_tensor(output) for output in read.outputs], weighed)
    there.close()
    routing.route(gpu.find(some_batch(3, 1)).unique, 2, 2)
    spec = two_segments(dtype, optimizer, eviction=eviction, admission=admission)
    with Store(spec, arena=Gpu(chunk_bytes=4096)) as store:
        for step in (1, 2, 3):
            ids, tables = keys_of(*range(5 * step, 5 * step + 8))
            rows = store.lookup(ids, tables, None, step, np.empty((8, 4), np.float32))
            store.apply_gradients(ids, tables, rows, np.ones((8, 4), np.float32), step)
        many, of = keys_of(*range(600), table=1)  # more than the first index holds
        store.lookup(many, of, None, 4, np.empty((600, 4), np.float32))
        store.assign(ids, tables, np.ones((8, 4), np.float32))
        store.peek(ids, tables, np.empty((8, 4), np.float32))
        save = store.state.at_rest()
        save._copy_aside(
            torch.arange(3).int(), torch.empty((3, 1 + store.state.layout.num_words), dtype=torch.int32)
        )
        save.close()
    with Store(spec, gpu_tier=GpuTier(hot_rows=0)) as store:
        store.lookup(many, of, None, 1, np.empty((600, 4), np.float32))
        for step in (3, 4):  # rows leave, and come back
            store.lookup(many + 600 * (step % 2), of, None, step, np.empty((600, 4), np.float32))


def compiled(folder):
    """Compiles the launches that a file of the folder lists, for a GPU that need not be here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "compiling.py", folder / "launches"],
        env={**environment, "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


CASES = [
    (girih.optim.SGD(lr=0.1, momentum=0.9), "float32"),
    (girih.optim.RowwiseAdagrad(lr=0.1), "bfloat16"),
    (girih.optim.Adam(lr=0.1), "float16"),
    (girih.optim.FTRL(), "float32"),
    (girih.optim.Adagrad(lr=0.1), "float32"),
]


@pytest.mark.timeout(900)
def test_all_that_is_launched_compiles(recorder, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "sparse" / "gpu"))
    monkeypatch.setattr(gpu_group, "_FEW", 0)  # gradients are always looked at beforehand
    for optimizer, dtype in CASES:
        launches(optimizer, dtype, LRU(max_rows=9), MinCount(count=2, cells=100))
    (tmp_path / "launches").write_text("".join(line + "\n" for line in recorder.found))
    compiled(tmp_path)
    modules = (counting, dedup, gradients, index, lookup, pool, records, routing, update)
    known = {
        name: each for module in modules for name, each in vars(module).items() if hasattr(each, "arg_names")
    }
    kernels = {name for name, each in known.items() if "BLOCK" in each.arg_names}
    assert {wanted["name"] for wanted in recorder.found.values()} == kernels


@pytest.mark.parametrize("aligned", [True, False])
def test_a_thread_reads_16_bytes_of_rows_that_are_aligned(aligned, tmp_path):
    """What lies at an address that was read from memory is read number by number, unless a kernel says otherwise."""
    types = dict.fromkeys(pool.pool_short.arg_names, "i32")
    types |= {"addresses": "*i64", "weights": "*fp32", "factors": "*fp32", "out": "*fp32"}
    types |= dict.fromkeys(("inverse", "offsets", "bags"), "*i32")
    values = {"WEIGHTED": False, "DTYPE": 0, "ALIGNED": aligned, "COLUMNS": 64, "BLOCK": 16}
    types |= dict.fromkeys(values, "constexpr")
    launch = {
        "module": pool.__name__, "name": "pool_short", "types": types, "values": values, "multiples": ["dim"], "ptx": str(tmp_path / "ptx"),
    }  # fmt: skip
    (tmp_path / "launches").write_text(json.dumps(launch))
    compiled(tmp_path)
    assert ("ld.global.v4" in (tmp_path / "ptx").read_text()) == aligned

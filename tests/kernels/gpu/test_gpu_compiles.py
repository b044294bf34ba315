"""Every kernel passes Triton's launcher and compiles to machine code for an H100 or H200, without a GPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_gpu_values
import torch

import girih
from girih.cli import bench
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import dedup, jit
from girih.models.needs import FIRST_ORDER
from girih.sparse.groups import gpu_group
from girih.sparse.groups.pack import pack
from girih.store import Keys, RowUpdate, Store
from girih.store.gpu.options import Gpu, GpuTier
from girih.tables import LRU, MinCount, Normal
from support.store_verbs import keys_of, two_segments

ALIKE = {"CHUNK_BITS": 6, "STRIDE": 32}  # kernels with another number compile in the same way
pytestmark = pytest.mark.skipif(not jit.INTERPRETED, reason="kernels are compiled by every other test here")


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
    dedup.route(gpu.find(some_batch(3, 1)).unique, 2, 2)
    spec = two_segments(dtype, optimizer, eviction=eviction, admission=admission)
    with Store(spec, arena=Gpu(chunk_bytes=4096)) as store:
        for step in (1, 2, 3):
            ids, tables = keys_of(*range(5 * step, 5 * step + 8))
            rows = store.lookup(Keys(ids, tables), step, np.empty((8, 4), np.float32))
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(np.ones((8, 4), np.float32), step))
        many, of = keys_of(*range(600), table=1)  # more than the first index holds
        store.lookup(Keys(many, of), 4, np.empty((600, 4), np.float32))
        store.assign(Keys(ids, tables), np.ones((8, 4), np.float32))
        store.peek(Keys(ids, tables), np.empty((8, 4), np.float32))
        save = store.state.at_rest()
        save._copy_aside(
            torch.arange(3).int(), torch.empty((3, 1 + store.state.layout.num_words), dtype=torch.int32)
        )
        save.close()
    with Store(spec, gpu_tier=GpuTier(hot_rows=0)) as store:
        store.lookup(Keys(many, of), 1, np.empty((600, 4), np.float32))
        for step in (3, 4):  # rows leave, and come back
            store.lookup(Keys(many + 600 * (step % 2), of), step, np.empty((600, 4), np.float32))


def compiled(launches, folder, *options):
    """Compiles launches through Triton's launcher, in a process that interprets nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    (folder / "launches").write_text("".join(json.dumps(launch) + "\n" for launch in launches))
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "compiling.py", folder / "launches", *options],
        env={
            **environment,
            "TRITON_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
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


@pytest.fixture
def gpu_launches(monkeypatch):
    """The module of benchmarks that records and compiles launches."""
    monkeypatch.syspath_prepend(str(bench.FOLDER))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "sparse" / "gpu"))
    monkeypatch.setattr(gpu_group, "_FEW", 0)  # gradients are always looked at beforehand
    return importlib.import_module("gpu_launches")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases", [pytest.param(CASES[2:3], marks=pytest.mark.smoke), CASES], ids=["one", "all"]
)
def test_every_kernel_of_the_repository_passes_tritons_launcher(gpu_launches, tmp_path, cases):
    recorded = {}

    def note(launch):
        launch["options"] |= {name: value for name, value in ALIKE.items() if name in launch["options"]}
        recorded[json.dumps(launch)] = launch

    with gpu_launches.recording(note):
        for optimizer, dtype in cases:
            launches(optimizer, dtype, LRU(max_rows=9), MinCount(count=2, cells=100))
        test_gpu_values.test_keys_hash_as_on_a_cpu()
        test_gpu_values.test_initial_values_are_the_cpus_bit_for_bit(Normal(), 5)
        test_gpu_values.test_rounding_is_the_cpus_bit_for_bit(at.BFLOAT16, False)
    compiled(recorded.values(), tmp_path, "--all")


def record_rows(gpu_launches, dim, dtype, *needs):
    """The launches on the embeddings of rows, by kernel. ``needs`` adds to the needs of one feature."""
    from test_gpu_group import batch_of, run

    schema = girih.Schema(
        [girih.Categorical(name="f", table="f"), girih.Sequence(name="s", table="f")],
        labels="click",
        tables=[girih.Table(name="f", dim=dim, dtype=dtype)],
    )
    needs = {"f": frozenset({"embedding", *needs}), "s": frozenset({"sequence"})}
    (group,) = pack(schema, needs, girih.optim.Adam(lr=0.1))
    recorded = {}
    with (
        gpu_launches.recording(lambda launch: recorded.setdefault(launch["name"], launch)),
        Store(group.spec, arena=Gpu(chunk_bytes=4096)) as store,
    ):
        gpu = gpu_group.GpuGroup(group, [store])
        for longest in (1, 40):
            ids = np.arange(4 * longest) % 7
            batch = batch_of(np.full((2, 2), longest), ids, weighted=False, seed=0)
            run(gpu, batch, 1, np.random.default_rng(0))
        values = np.ones((7, group.spec.dim), np.float32)
        store.apply_gradients(
            Keys(*keys_of(*range(7)), rows=np.arange(7, dtype=np.int32)), RowUpdate(values, 2)
        )
        store.assign(Keys(*keys_of(*range(7))), values)
        store.peek(Keys(*keys_of(*range(7))), values)
    return {name: launch for name, launch in recorded.items() if "ALIGNED" in launch["options"]}


ON_ROWS = {
    "write_initial", "gather", "spread", "pool_short", "pool_long", "_sum_pieces", "_sum_terms", "move_rows", "sum_and_move_rows",
    "assign_rows",
}  # fmt: skip


def test_rows_of_whole_vectors_move_16_bytes_at_once(gpu_launches, tmp_path):
    """Triton knows a number of columns to be even only if it is a multiple of 16, unless a kernel says more."""
    every_kernel = record_rows(gpu_launches, 12, "float32")
    assert every_kernel.keys() == ON_ROWS
    recorded = [launch | {"vectors": True} for launch in every_kernel.values()]
    for dim in (4, 8, 20, 24, 40, 64):
        recorded.append(record_rows(gpu_launches, dim, "float32")["pool_short"] | {"vectors": True})
    for dim in (8, 24, 40):
        recorded.append(record_rows(gpu_launches, dim, "bfloat16")["pool_short"] | {"vectors": True})
    recorded.append(record_rows(gpu_launches, 6, "float32")["pool_short"] | {"vectors": False})
    recorded.append(record_rows(gpu_launches, 12, "bfloat16")["pool_short"] | {"vectors": False})
    compiled(recorded, tmp_path)


def test_a_first_order_column_leaves_embeddings_aligned(gpu_launches, tmp_path):
    """A row has 17 numbers. Both records and initial values of keys without a row are aligned."""
    every_kernel = record_rows(gpu_launches, 16, "float32", FIRST_ORDER)
    recorded = [every_kernel[name] for name in ("write_initial", "pool_short", "pool_long", "spread")]
    assert all(launch["options"]["ALIGNED"] for launch in recorded)
    compiled([launch | {"vectors": True} for launch in recorded], tmp_path)

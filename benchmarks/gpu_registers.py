"""Registers, spills and instructions of GPU kernels as a step launches them, compiled for an H200; needs no GPU.

    girih bench gpu_registers                          SGD and Adam, D = 64 and 128, rows of float32
    girih bench gpu_registers --page docs/gpu.md       writes them into the page as well

A small step is run interpreted, to learn what is launched with which types; tiles are then as large as a GPU's would be. The numbers are ptxas'
and nvdisasm's: instructions that each warp of a program has, and how many of them stand in loops. An
H200 has 65,536 registers per multiprocessor, so that a program of 128 threads with 64 registers each leaves room for eight.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness

BEGIN, END = "<!-- registers: begin -->", "<!-- registers: end -->"
KERNELS = (
    "pool_short", "pool_long", "weigh_short", "weigh_long", "_sum_pieces", "_sum_terms", "write_initial", "move_rows",
    "sum_and_move_rows",
)  # fmt: skip
"""Those that work on tiles of columns."""
ON_KEYS = {
    "_claim": 256, "_find_first": 1024, "_number": 256, "_describe_terms": 256, "read_known": 256, "ask_admission": 256,
    "add_sightings": 256, "count_read": 1024, "count_moved": 1024, "_number_rows": 1024, "make_rows": 256, "rows_to_move": 256,
    "_find_largest": 4096,
}  # fmt: skip
"""Those that work on ids, keys or numbers one by one, and how many of them a program has."""
_OF_OPTIMIZERS = ("write_initial", "move_rows", "sum_and_move_rows")
DIMS, OPTIMIZERS = (64, 128), ("sgd", "adam")
CAPABILITY = 90
WARPS = 4


def main() -> None:
    """Runs the benchmark; status 1 where a kernel does not compile."""
    parser = harness.parser("gpu_registers", __doc__)
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page whose table is written anew")
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS))
    parser.add_argument("--compile", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        print(json.dumps([compiled(each) for each in json.loads(arguments.compile.read_text())]))
        return
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    report = harness.Report("gpu_registers", arguments)
    columns = {
        "kernel": "{}",
        "D": "{}",
        "optimizer": "{}",
        "program": "{}",
        "registers": "{}",
        "spilled bytes": "{}",
        "instructions": "{}",
        "in loops": "{}",
    }
    table = report.table(f"sm_{CAPABILITY}, {WARPS} warps a program", columns)
    wanted = [each for dim in arguments.dims for each in launches(dim)]
    wanted = list({(each["name"], each["D"], each["optimizer"]): each for each in wanted}.values())
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "wanted.json")
        file.write_text(json.dumps(wanted))
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        words = [sys.executable, __file__, "--compile", str(file)]
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for row in json.loads(done.stdout):
        table.row(row)
    report.finish()
    if arguments.page is not None:
        write_table(arguments.page, table.rows)


def launches(dim: int) -> list[dict[str, Any]]:
    """The kernels that a step on rows of ``dim`` columns launches, each once."""
    import numpy as np
    import torch

    import girih
    from girih.data import Batch
    from girih.kernels.gpu import counting, dedup, gradients, jit
    from girih.sparse.groups import gpu_group
    from girih.sparse.groups.gpu_group import GpuGroup
    from girih.sparse.groups.pack import pack
    from girih.store import Store
    from girih.store.gpu.options import Gpu

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    moved_by = ["none"]
    launch = jit.launch
    modules, few = (jit, counting, dedup, gradients), gpu_group._FEW
    needs = {"f": frozenset({"embedding"})}

    def noted(kernel: Any, num_items: int, block: int, *given: Any, **options: Any) -> None:
        name = kernel.fn.__name__
        if name in KERNELS or name in ON_KEYS:
            each = described(kernel, block, given, options, jit.VARYING)
            each |= {
                "D": dim if name in KERNELS else "any",
                "optimizer": moved_by[0] if name in _OF_OPTIMIZERS else "any",
            }
            found.setdefault((name, each["optimizer"]), each)
        launch(kernel, num_items, block, *given, **options)

    for module in modules:
        module.launch = noted  # type: ignore[attr-defined]
    gpu_group._FEW = 0  # gradients are looked at beforehand
    try:
        for optimizer, kind in (("sgd", girih.optim.SGD(lr=0.1)), ("adam", girih.optim.Adam(lr=0.1))):
            moved_by[0] = optimizer
            for longest in (1, 40):  # bags of one id, and of many
                admission = None if longest == 1 else girih.tables.MinCount(count=2)
                table = girih.Table(name="f", dim=dim, admission=admission)
                schema = girih.Schema(
                    [girih.Categorical(name="f", table="f")], labels="click", tables=[table]
                )
                (group,) = pack(schema, needs, kind)
                ids = np.arange(4 * longest, dtype=np.int64) % 3 if longest == 1 else np.zeros(600, np.int64)
                offsets = np.linspace(0, len(ids), 5).astype(np.int32)
                labels = np.zeros((4, 1), np.float32)
                batch = Batch(ids=ids, offsets=offsets, numeric=np.empty((4, 0), np.float32), labels=labels)
                with Store(group.spec, arena=Gpu(chunk_bytes=1 << 16)) as store:
                    gpu = GpuGroup(group, [store])
                    read, columns = gpu.lookup_weighted(batch, 1, train=True)
                    gpu.weight_gradients(read, columns, [torch.ones(4, dim)], batch)
                    sums = gpu.gradients(read, [torch.ones(4, dim)], batch)
                    if sums is not None:
                        gpu.apply(read, sums, 1, 1.0)
                        gpu._state.move(read.keys.keys, read.rows, sums.totals, sums.refused, 1, 1.0)
    finally:
        gpu_group._FEW = few
        for module in modules:
            module.launch = launch  # type: ignore[attr-defined]
    return list(found.values())


def described(
    kernel: Any, block: int, given: tuple[Any, ...], options: Mapping[str, Any], varying: tuple[str, ...]
) -> dict[str, Any]:
    """A launch as the compiler takes it, with tiles of a GPU's size: types of arguments, and values that are compiled in."""
    import torch

    kinds = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64"}
    types: dict[str, str] = {}
    values: dict[str, Any] = {}
    multiples = []
    by_name = dict(zip(kernel.arg_names, given, strict=False))
    by_name |= {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    for name, value in by_name.items():
        if isinstance(value, torch.Tensor):
            types[name] = kinds[value.dtype]
        elif value == 1 and name not in varying:
            types[name], values[name] = "constexpr", 1
        else:
            types[name] = "i64" if value >= 2**31 else "i32"
            if value % 16 == 0 and name not in varying:
                multiples.append(name)
    rows = max(1, 1024 // options["COLUMNS"]) if "COLUMNS" in options else ON_KEYS[kernel.fn.__name__]
    sizes = {"BLOCK": block if block == 1 else rows}
    if "AT_ONCE" in options:
        sizes["AT_ONCE"] = min(256 if kernel.fn.__name__ == "_sum_pieces" else 128, rows)
    for name, value in {**options, **sizes}.items():
        if name not in by_name:
            types[name], values[name] = "constexpr", value
    return {
        "module": kernel.fn.__module__,
        "name": kernel.fn.__name__,
        "types": {name: types[name] for name in kernel.arg_names},
        "multiples": multiples,
        "values": values,
    }


def compiled(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: what ptxas says of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from girih.kernels.gpu.jit import EXACT

    kernel = getattr(importlib.import_module(wanted["module"]), wanted["name"])
    types = wanted["types"]
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(types.items())
        if kind[0] == "*" or name in wanted["multiples"]
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=wanted["values"], attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", CAPABILITY, 32), options={**EXACT, "num_warps": WARPS}
    )
    with tempfile.TemporaryDirectory() as directory:
        source_file, binary = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source_file.write_text(made.asm["ptx"])
        ptxas = Path(get_ptxas(CAPABILITY).path)
        words = [ptxas, "-v", "--fmad=false", f"--gpu-name=sm_{CAPABILITY}a", "-o", binary, source_file]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stderr
        words = [ptxas.with_name("nvdisasm"), "-c", binary]
        total, in_loops = instructions(
            subprocess.run(words, capture_output=True, text=True, check=True).stdout
        )
    values = wanted["values"]
    tile = str(values.get("AT_ONCE", values["BLOCK"]))
    if "COLUMNS" in values:
        tile += f" × {values['COLUMNS']}"
    return {
        "kernel": wanted["name"],
        "D": wanted["D"],
        "optimizer": wanted["optimizer"],
        "program": tile,
        "registers": _number(told, r"Used (\d+) registers"),
        "spilled bytes": _number(told, r"(\d+) bytes spill stores")
        + _number(told, r"(\d+) bytes spill loads"),
        "instructions": total,
        "in loops": in_loops,
    }


def instructions(listing: str) -> tuple[int, int]:
    """How many instructions a kernel has, as nvdisasm lists it, and how many stand between a label and a branch back to it."""
    labels: dict[str, int] = {}
    total, loops = 0, set[int]()
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\S+):", line):
            labels[label[1]] = total
        elif code := re.search(r"/\*[0-9a-f]+\*/\s+(.+?)\s*;", line):
            back = re.search(r"\bBRA\b.*?(\.L_[\w.]+)", code[1])
            # a kernel ends with a branch to itself, behind its exit
            if back and labels.get(back[1], total) < total:
                loops |= set(range(labels[back[1]], total + 1))
            total += not code[1].startswith("NOP")
    return total, len(loops)


def _number(told: str, pattern: str) -> int:
    found = re.search(pattern, told)
    if found is None:
        raise ValueError(f"ptxas said nothing of {pattern}: {told[:300]}")
    return int(found[1])


def write_table(page: Path, rows: list[dict[str, Any]]) -> None:
    """Puts the rows between the markers of a page."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: the markers {BEGIN} and {END} are missing")
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{behind}")


if __name__ == "__main__":
    main()

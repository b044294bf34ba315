"""Registers, spills and instructions of GPU kernels as a step launches them, compiled for an H200; needs no GPU.

    girih bench gpu_registers                          SGD and Adam, D = 64 and 128, rows of float32
    girih bench gpu_registers --page docs/gpu.md       writes them into the page as well

A small step is run interpreted, to learn what is launched with which types; tiles are then as large as a GPU's would be. The numbers are ptxas'
and nvdisasm's: instructions that each warp of a program has, and how many of them stand in loops. An
H200 has 65,536 registers per multiprocessor, so that a program of 128 threads with 64 registers each leaves room for eight.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_launches
import harness
from gpu_launches import CAPABILITY, ON_KEYS

BEGIN, END = "<!-- registers: begin -->", "<!-- registers: end -->"
KERNELS = (
    "pool_short", "pool_long", "weigh_short", "weigh_long", "_sum_pieces", "_sum_terms", "write_initial", "move_rows",
    "sum_and_move_rows",
)  # fmt: skip
"""Those that work on tiles of columns."""
_OF_OPTIMIZERS = ("write_initial", "move_rows", "sum_and_move_rows")
DIMS, OPTIMIZERS = (64, 128), ("sgd", "adam")
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
    from girih.sparse.groups import gpu_group
    from girih.sparse.groups.gpu_group import GpuGroup
    from girih.sparse.groups.pack import pack
    from girih.store import Store
    from girih.store.gpu.group_state import DeviceUpdate
    from girih.store.gpu.options import Gpu

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    moved_by = ["none"]
    needs = {"f": frozenset({"embedding"})}

    def note(launch: dict[str, Any]) -> None:
        name = launch["name"]
        if name in KERNELS or name in ON_KEYS:
            launch["D"] = dim if name in KERNELS else "any"
            launch["optimizer"] = moved_by[0] if name in _OF_OPTIMIZERS else "any"
            found.setdefault((name, launch["optimizer"]), launch)

    gpu_group._FEW = 0  # gradients are looked at beforehand
    with gpu_launches.recording(note):
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
                        change = DeviceUpdate(sums.totals, sums.nonfinite_key, 1, 1.0)
                        gpu._state.move(read.keys.keys, read.rows, change)
    return list(found.values())


def compiled(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: what ptxas says of a launch."""
    from triton.backends.nvidia.compiler import get_ptxas

    made = gpu_launches.compiled(wanted, num_warps=WARPS)
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
    values = wanted["options"]
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

"""``girih bench capacity`` at toy sizes: rows really grow, memory is really counted, and what cannot fit is refused."""

import json
import subprocess
import sys

import pytest

from companions import ran
from girih.cli import bench
from girih.kernels.cpu.jit import JIT_DISABLED

SIZES = (400, 900) if JIT_DISABLED else (20_000, 60_000)
BATCH = "1" if JIT_DISABLED else "16"


def capacity(directory, *words):
    return subprocess.run(
        [sys.executable, str(bench.FOLDER / "capacity.py"), *words],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.heavy
def test_runs_and_says_what_it_found(tmp_path):
    words = (
        f"--rows {SIZES[0]} {SIZES[1]} --batch {BATCH} --fill 520 --rounds 2 --lru-rows 1040 --lru-steps 5"
        f" --file-rows {SIZES[0]} --json found.json"
    )
    done = capacity(tmp_path, *words.split(), "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    growth, longest, in_memory, speed, lru, in_file, _, file_bytes = (t["rows"] for t in found["tables"])
    assert [row["rows"] for row in growth] == list(SIZES)
    assert all(row["doublings"] >= 1 for row in growth + in_file)
    if not JIT_DISABLED:
        assert all(row["growing ms"] > 0 and row["steps"] > 1 for row in growth)
        assert {row["growing"] for row in longest} == {"yes", "no"}
    for row in in_memory + file_bytes:
        assert (row["weights"], row["state"], row["meta"], row["padding"]) == (32, 4, 32, 4)
        assert row["beyond"] == row["all"] - 36
        assert row["index"] >= 8 / 0.75
    assert [row["rows"] >= wanted for row, wanted in zip(speed, SIZES, strict=True)] == [True, True]
    assert lru[0]["new ids"] == 5 * 26 * int(BATCH)
    assert lru[0]["evicted"] >= lru[0]["new ids"]
    assert file_bytes[0]["on disk"] > 72
    assert not list(tmp_path.glob("girih-bench-*"))


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    refused = ran(bench.FOLDER / "capacity.py", "--rows", str(10**13), cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("girih: bench capacity: --rows [10000000000000]: they take ")
    words = ("--only", "file", "--directory", "nowhere")
    nowhere = ran(bench.FOLDER / "capacity.py", *words, cwd=tmp_path)
    assert nowhere.returncode == 2
    assert (
        nowhere.stderr
        == "girih: bench capacity: --directory nowhere: no such directory; make it first; see --help\n"
    )

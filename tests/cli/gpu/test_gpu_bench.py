"""Benchmarks of a GPU run, interpreted where there is none, and write all their tables."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from girih.cli import bench

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.heavy
def test_the_benchmark_runs_quickly_and_writes_all_its_tables(tmp_path):
    words = [sys.executable, "-m", "girih", "bench", "gpu", "--quick", "--json", tmp_path / "gpu.json"]
    done = subprocess.run(words, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    titles = ("copies", "the sparse half", "keys alone", "whole models", "tiers")
    assert len(found["tables"]) == len(titles)
    assert all(table["title"].startswith(title) for table, title in zip(found["tables"], titles, strict=True))
    assert all(table["rows"] for table in found["tables"])
    assert "not measured: dedup of 1,048,576 ids" in done.stdout


def test_a_run_that_is_terminated_keeps_its_rows_and_goes_on_from_them(tmp_path):
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "girih", "bench", "gpu", "--quick", "--parts", "keys", "--resume", "tag"]
    words += ["--json", str(file)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (file.is_file() and len(json.loads(file.read_text())["tables"]) > 1):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == -signal.SIGTERM
    copies, keys = json.loads(file.read_text())["tables"]
    assert [row["what"] for row in keys["rows"]] == ["dedup"]
    subprocess.run(words, check=True, capture_output=True)
    copies_after, keys_after = json.loads(file.read_text())["tables"]
    assert copies_after == copies
    assert keys_after["rows"][0] == keys["rows"][0]
    assert [row["what"] for row in keys_after["rows"]] == ["dedup", "find, the index half full"]


@pytest.mark.heavy
def test_a_quick_run_of_training_ends_with_a_score(tmp_path):
    words = [
        sys.executable,
        "-m",
        "girih",
        "bench",
        "gpu_train",
        "--quick",
        "--json",
        tmp_path / "train.json",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (table,) = json.loads((tmp_path / "train.json").read_text())["tables"]
    (row,) = table["rows"]
    assert row["steps"] == 4
    assert 0 < row["AUC"] < 1


@pytest.mark.smoke
@pytest.mark.skipif(torch.cuda.is_available(), reason="records interpreted kernels")
def test_every_kernel_of_a_step_is_recorded():
    code = "import gpu_registers; print(*{each['name'] for each in gpu_registers.launches(8)})"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=bench.FOLDER, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import gpu_registers

    assert set(done.stdout.split()) == {*gpu_registers.KERNELS, *gpu_registers.ON_KEYS}


@pytest.mark.heavy
def test_kernels_as_a_step_launches_them_compile_and_spill_nothing(tmp_path):
    words = [sys.executable, "-m", "girih", "bench", "gpu_registers", "--json", tmp_path / "registers.json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (table,) = json.loads((tmp_path / "registers.json").read_text())["tables"]
    import gpu_registers

    for dim in (64, 128):
        assert {row["kernel"] for row in table["rows"] if row["D"] == dim} == set(gpu_registers.KERNELS)
    assert {row["kernel"] for row in table["rows"] if row["D"] == "any"} == set(gpu_registers.ON_KEYS)
    assert all(0 <= row["in loops"] < row["instructions"] for row in table["rows"])
    assert next(row for row in table["rows"] if row["kernel"] == "_sum_terms")["in loops"] > 0
    assert {row["spilled bytes"] for row in table["rows"]} == {0}
    assert all(0 < row["registers"] <= 255 for row in table["rows"])

"""Runs all checks of a GPU machine in stages, the most valuable first. ``make gpu``

It needs no network and installs nothing: stages run from the checkout. Each stage has its own time limit, and all stages
together have ``TOTAL_S``. Everything is on disk before the next row or test begins, so a signal loses nothing that is finished.

Variables:
    GPU_PYTHON     interpreter of the stages; it needs torch, triton and pytest
    GPU_OUT        output folder, runs/gpu by default
    GPU_STAGES     names of stages, separated by commas; all stages by default
    GPU_PATIENCE   factor of all time limits, for a slow machine; 1 by default
    GPU_INTERPRET  1: without a GPU, run the GPU stages with interpreted kernels, to show that they start

Files in the output folder:
    stages.json    status, seconds, code and device of each stage
    tests.jsonl    one line per finished test
    gpu.json       figures of ``girih bench gpu``, rewritten after every row
    gpu-train.json result of ``girih bench gpu_train``
    log.txt        output of all stages

A stage is skipped if it passed before with the same code, on the same device, with the same versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from gpu_plan import STAGES, TOTAL_S, Stage
from gpu_processes import stop

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
CODE = ("src", "tests", "benchmarks", "dev", "pyproject.toml", "Makefile")
"""Files that decide what a stage shows."""
RECORD_KEYS = {"stage", "status", "code", "device", "versions"}
"""Keys of a record in stages.json that a later run reads."""
MODULES = (
    "torch", "triton", "numba", "numpy", "pyarrow", "safetensors", "fsspec", "rich", "click", "jinja2", "tomli_w",
    "pytest", "xdist", "pytest_timeout", "hypothesis",
)  # fmt: skip
"""Modules that GPU_PYTHON needs."""
PROBE = f"""
import importlib.util, json, platform, sys
from importlib.metadata import version
missing = [name for name in {MODULES} if importlib.util.find_spec(name) is None]
if missing or sys.version_info < (3, 11):
    sys.exit(f"it is Python {{platform.python_version()}}" + (f" without {{', '.join(missing)}}" if missing else ""))
import torch
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
versions = {{name: version(name) for name in ("torch", "triton", "numba", "numpy")}}
print(json.dumps({{"gpu": gpu, "versions": {{"python": platform.python_version(), **versions}}}}))
"""


@dataclass
class Outcome:
    """The end of a stage in this run. ``status`` begins with "passed", "failed" or "not run"."""

    stage: Stage
    status: str
    seconds: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)


class Session:
    """One run of the script.

    Args:
        python: absolute path or name of the interpreter; probe: what PROBE printed.
    """

    def __init__(self, python: str, probe: dict[str, Any], out: Path) -> None:
        self.python, self.gpu, self.versions, self.out = python, probe["gpu"], probe["versions"], out
        self.interpret = interpret() and self.gpu is None
        self.identity = {"code": code(), "device": self.gpu or "cpu", "versions": self.versions}
        self.signal: int | None = None
        self.patience = patience()
        self.deadline = START + TOTAL_S * self.patience
        self.end = f"the {TOTAL_S * self.patience:.0f} s of all stages were over"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, frame: object) -> None:
        self.signal = number

    def run(self, stages: Sequence[Stage]) -> list[Outcome]:
        """Runs stages in turn; writes the record of each before the next one starts."""
        outcomes = []
        for stage in stages:
            try:
                outcome = self._run_unless_needless(stage)
                if outcome.seconds:
                    self._record(outcome)
            except OSError as error:  # such as a full disk
                outcome = Outcome(stage, f"failed: {error.filename or self.out}: {error.strerror}")
            outcomes.append(outcome)
            print(f"{stage.name}: {outcome.status}", flush=True)
        return outcomes

    def _run_unless_needless(self, stage: Stage) -> Outcome:
        if self.signal is not None:
            return Outcome(stage, f"not run: {signal.Signals(self.signal).name} came before")
        if any(self._is_pass(record, stage) for record in read_records(self.out)):
            return Outcome(stage, "passed before, with this code on this device")
        if stage.needs_gpu and self.gpu is None and not self.interpret:
            return Outcome(stage, "not run: no GPU")
        limit_s = min(stage.limit_s * self.patience, self.deadline - time.monotonic())
        if limit_s < 1:
            return Outcome(stage, f"not run: {self.end}")
        print(f"{stage.name}: at most {limit_s:.0f} s, {stage.shows}", flush=True)
        return self._run(stage, limit_s)

    def _is_pass(self, record: dict[str, Any], stage: Stage) -> bool:
        same = all(record[name] == value for name, value in self.identity.items())
        return same and record["stage"] == stage.name and record["status"].startswith("passed")

    def _run(self, stage: Stage, limit_s: float) -> Outcome:
        start, num_before = time.monotonic(), len(read_outcomes(self.out))
        self._record(Outcome(stage, "failed: the script was killed during this stage"))
        fault = None
        for command in self._commands(stage):
            fault = self._run_command(command, stage, start + limit_s)
            if fault is not None:
                break
        outcome = Outcome(stage, "", max(0.1, round(time.monotonic() - start, 1)))
        outcome.tests = dict(Counter(read_outcomes(self.out)[num_before:]))
        if fault is None and stage.tests and not outcome.tests.get("passed"):
            fault = "no test passed"
        outcome.status = "passed" if fault is None else f"failed: {fault}"
        if stage.needs_gpu and self.gpu is None:
            outcome.status = f"not run on a GPU; interpreted, it {outcome.status}"
        if fault is not None and self.signal is None:
            print("".join(f"  | {line}\n" for line in tail(self.out / "log.txt")), end="", flush=True)
        return outcome

    def _commands(self, stage: Stage) -> Iterator[list[str]]:
        smi = shutil.which("nvidia-smi")
        if stage.name == "software" and smi is not None:
            yield [smi, "-L"]
        commands = stage.interpreted if self.interpret and stage.interpreted else stage.commands
        for words in commands:
            places = {"{out}": str(self.out), "{code}": self.identity["code"]}
            yield [self.python, *(fill_in(word, places) for word in words)]

    def _run_command(self, command: Sequence[str], stage: Stage, deadline: float) -> str | None:
        """Runs one command until its end, its deadline or a signal.

        Returns:
            Why it did not pass; None if it passed.
        """
        with (self.out / "log.txt").open("ab", buffering=0) as log:
            log.write(f"\n== {stage.name}: {' '.join(command)}\n".encode())
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(stage), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            while process.poll() is None and self.signal is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            status = process.poll()
            stop(process)
        if status is None and self.signal is not None:
            return f"stopped by {signal.Signals(self.signal).name}"
        if status is None and deadline >= self.deadline:
            return self.end
        if status is None:
            return f"over its limit of {stage.limit_s * self.patience:.0f} s"
        if status == 0:
            return None
        return f"status {status}: {' '.join(tail(self.out / 'log.txt', 1))[:100]}"

    def _environment(self, stage: Stage) -> dict[str, str]:
        paths = [str(ROOT / "src"), str(ROOT / "dev"), os.environ.get("PYTHONPATH", "")]
        environment = {
            "TRITON_CACHE_DIR": str(ROOT / "runs" / "triton"), "GIRIH_PATIENCE_S": "900", "GOMP_SPINCOUNT": "0",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1",
            "GPU_STAGE": stage.name, "GPU_TESTS": str(self.out / "tests.jsonl"),
        }  # fmt: skip
        return environment | ({"TRITON_INTERPRET": "1"} if self.interpret else {})

    def _record(self, outcome: Outcome) -> None:
        """Replaces the record of this stage, code, device and versions in stages.json."""
        record = {
            "stage": outcome.stage.name, "status": outcome.status, "seconds": outcome.seconds, "tests": outcome.tests,
            "when": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **self.identity,
        }  # fmt: skip
        key = ("stage", *self.identity)
        records = [old for old in read_records(self.out) if any(old[name] != record[name] for name in key)]
        text = json.dumps({"stages": [*records, record]}, indent=1)
        replacement = self.out / "stages.json.new"
        replacement.write_text(text + "\n")
        replacement.replace(self.out / "stages.json")


def fill_in(word: str, places: Mapping[str, str]) -> str:
    """Replaces each placeholder in a word."""
    for place, value in places.items():
        word = word.replace(place, value)
    return word


def code() -> str:
    """A hash of the files that decide what a stage shows, committed or not."""
    digest = hashlib.sha256()
    for name in CODE:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not {"__pycache__", "girih.egg-info"} & set(file.parts):
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return f"{commit()}-{digest.hexdigest()[:8]}"


def commit() -> str:
    """Short name of the commit that is checked out, or "no-git" without git's history."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return "no-git"


def read_records(out: Path) -> list[dict[str, Any]]:
    """Records of earlier stages; empty if there is no stages.json.

    Raises:
        ValueError: the file contains something else.
    """
    file = out / "stages.json"
    if not file.is_file():
        return []
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        records: list[dict[str, Any]] = json.loads(file.read_text())["stages"]
        if all(record.keys() >= RECORD_KEYS for record in records):
            return records
    raise ValueError("stages.json contains no records of stages")


def read_outcomes(out: Path) -> list[str]:
    """Outcomes of finished tests of all stages. Skips lines that a killed process or a full disk cut off."""
    file = out / "tests.jsonl"
    outcomes = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            outcomes.append(str(json.loads(line)["outcome"]))
    return outcomes


def tail(file: Path, num_lines: int = 15) -> list[str]:
    """The last lines of the last command in a log."""
    output = file.read_text(errors="replace").rpartition("\n== ")[2]
    return output.splitlines()[-num_lines:]


def refuse(message: str) -> NoReturn:
    """Ends the script with one line and status 2."""
    print(f"make gpu: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def patience() -> float:
    """The factor in GPU_PATIENCE."""
    text = os.environ.get("GPU_PATIENCE") or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    return factor if 0 < factor < 1000 else refuse(f"GPU_PATIENCE = {text}: expected a number such as 2")


def interpret() -> bool:
    """True if GPU_INTERPRET is 1."""
    text = os.environ.get("GPU_INTERPRET") or "0"
    return text == "1" if text in ("0", "1") else refuse(f"GPU_INTERPRET = {text}: expected 0 or 1")


def chosen_stages() -> list[Stage]:
    """The stages in GPU_STAGES, in the script's order."""
    text = os.environ.get("GPU_STAGES", "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    valid = [stage.name for stage in STAGES]
    unknown = [name for name in names if name not in valid]
    if unknown or (text and not names):
        refuse(f"GPU_STAGES: no stage {', '.join(unknown) or text}; expected some of {', '.join(valid)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def probe_python(python: str) -> tuple[str, dict[str, Any]]:
    """The interpreter's path, and what PROBE prints under it."""
    needs = f"expected GPU_PYTHON to name a Python 3.11 or later that has {', '.join(MODULES)}"
    path = shutil.which(str(ROOT / python)) or shutil.which(python)
    if path is None:
        refuse(f"GPU_PYTHON = {python}: no such program; {needs}")
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=120, cwd=ROOT)
        if done.returncode == 0:
            return path, json.loads(done.stdout.splitlines()[-1])
        fault = (done.stderr.strip().splitlines() or [f"it ends with status {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        fault = str(error)
    refuse(f"GPU_PYTHON = {python}: {fault}; {needs}")


def output_folder() -> Path:
    """GPU_OUT, created if it is missing."""
    out = Path(ROOT, os.environ.get("GPU_OUT") or "runs/gpu")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "log.txt").open("ab"):
            pass
        if not os.access(out, os.W_OK):
            raise PermissionError("no permission to write there")
        read_records(out)
        read_outcomes(out)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        refuse(
            f"GPU_OUT = {out}: {reason}; expected a folder that can be written, empty or with earlier results"
        )
    return out


def print_list() -> None:
    """Prints the stages with their limits."""
    width = max(len(stage.name) for stage in STAGES)
    for stage in STAGES:
        print(
            f"{stage.name:{width}} {stage.limit_s:4} s  {'GPU' if stage.needs_gpu else '   '}  {stage.shows}"
        )
    print(f"{'':{width}} {sum(stage.limit_s for stage in STAGES):4} s  in all")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Prints each stage: passed, failed or not run."""
    width = max(len(outcome.stage.name) for outcome in outcomes)
    print(f"\n{'stage':{width}}  seconds  limit  status")
    for outcome in outcomes:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.tests.items()))
        status = outcome.status + (f" (tests: {counts})" if counts else "")
        limit_s = outcome.stage.limit_s * patience()
        print(f"{outcome.stage.name:{width}}  {outcome.seconds:7.1f}  {limit_s:5.0f}  {status}")
    kinds = ("passed", "failed", "not run")
    print(", ".join(f"{sum(each.status.startswith(kind) for each in outcomes)} {kind}" for kind in kinds))


def main() -> int:
    """Runs the chosen stages; status 0 if all passed, 1 if not, 128 + n after signal n."""
    if "--list" in sys.argv[1:]:
        print_list()
        return 0
    stages = chosen_stages()
    patience()
    interpret()
    out = output_folder()
    path, probe = probe_python(os.environ.get("GPU_PYTHON") or sys.executable)
    session = Session(path, probe, out)
    versions = ", ".join(f"{name} {version}" for name, version in session.versions.items())
    print(
        f"{session.gpu or 'no GPU'}; {versions}; code {session.identity['code']}; results in {out}",
        flush=True,
    )
    outcomes = session.run(stages)
    print_table(outcomes)
    if session.signal is not None:
        return 128 + session.signal
    return 0 if all(outcome.status.startswith("passed") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

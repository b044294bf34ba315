"""Runs on a Ray cluster of this machine beside the same runs by plain processes, in turns: samples/s and seconds in all.

    girih bench ray_runs [--strategies hybrid synchronous] [--rounds 5]
    girih bench ray_runs --two-nodes                    # as root: two network namespaces, a node of Ray in each

Both talk by TCP. ``of plain`` is the median over rounds of a round's own ratio, with the least and the most; plain processes run twice in a round, so that
their second ratio says what this machine can tell apart. The cluster is there all the time, also beside plain processes. ``--two-nodes`` measures runs over both nodes alone: there is no launcher of plain processes on two hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import harness
import network
import pyarrow.parquet as pq
from two_versions import CONFIG, STRATEGIES

from girih.cluster.roles import HostSpec
from girih.data.click_log import click_log

PORT, CLIENT_PORT = 26479, 26480
READY_S = 180.0
PLAIN = "plain processes"
TRAINERS = 2


def main() -> None:
    """Prints a row for each strategy."""
    parser = harness.parser("ray_runs", __doc__)
    parser.add_argument(
        "--strategies", nargs="+", choices=list(STRATEGIES), default=["hybrid", "synchronous"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--two-nodes", action="store_true")
    options = parser.parse_args()
    report = harness.Report("ray_runs", options)
    if report.peer("ray", "pip install girih[cluster] does") is None:
        report.finish()
        return
    if options.two_nodes and (why := network.missing()):
        parser.error(f"--two-nodes {why}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        rows, _ = click_log(options.examples, start=0, cardinality=20_000)
        pq.write_table(rows, place / "train.parquet")
        (place / "config.toml").write_text(CONFIG)
        nodes = [HostSpec()]
        if options.two_nodes:
            nodes = list(stack.enter_context(network.network(["one", "two"], None)).places.values())
        address = stack.enter_context(cluster(nodes))
        columns = {
            "strategy": "{}",
            "by": "{}",
            "samples/s": "{:,.0f}",
            "of plain": "{:.3f}×",
            "least": "{:.3f}×",
            "most": "{:.3f}×",
            "seconds in all": "{:.1f}",
        }
        table = report.table("runs", columns)
        for strategy in options.strategies:
            words = ["--set", "strategy.trainers=2", "--strategy", strategy]
            if strategy != "synchronous" and strategy != "substitution":
                words += ["--set", "strategy.transport=tcp"]
            ways = {"Ray": ["--cluster", address]}
            if not options.two_nodes:
                ways |= {PLAIN: [], f"{PLAIN}, again": []}
            contestants = {
                way: partial(_contestant, nodes[0], place, [*words, *more]) for way, more in ways.items()
            }
            measured = harness.alternate(contestants, options.rounds, warmup=1)
            for way, times in measured.items():
                beside = sorted(
                    one[0] / plain[0] for one, plain in zip(times, measured.get(PLAIN, []), strict=False)
                )
                table.row(
                    {
                        "strategy": strategy,
                        "by": way,
                        "samples/s": harness.median_part(times, 0),
                        "of plain": median(beside) if beside else None,
                        "least": beside[0] if beside else None,
                        "most": beside[-1] if beside else None,
                        "seconds in all": harness.median_part(times, 1),
                    }
                )
    report.finish()


def _contestant(node: HostSpec, place: Path, words: Sequence[str], number: int) -> tuple[float, float]:
    return run(node, place, words)


def run(node: HostSpec, place: Path, words: Sequence[str]) -> tuple[float, float]:
    """One run: samples/s by its summary, and seconds of the whole command."""
    directory = place / f"{time.monotonic_ns()}"
    begun = time.perf_counter()
    command = [sys.executable, "-m", "girih", "train", "config.toml", "--run", str(directory), *words]
    subprocess.run(
        [*node.command, *command],
        check=True,
        capture_output=True,
        cwd=place,
        env={**os.environ, **node.environment},
    )
    seconds = time.perf_counter() - begun
    return json.loads((directory / "summary.json").read_text())["samples_per_s"], seconds


@contextmanager
def cluster(nodes: Sequence[HostSpec], num_cpus: int = 16) -> Iterator[str]:
    """A Ray cluster with a node on each host, for so many processes of a core each; yields the address of its head."""
    with tempfile.TemporaryDirectory(prefix="girih-ray-") as folder:
        head = f"{nodes[0].host}:{PORT}"
        own = ["--head", f"--port={PORT}", f"--ray-client-server-port={CLIENT_PORT}", f"--temp-dir={folder}"]
        started = []
        try:
            for number, node in enumerate(nodes):
                words = [*own, "--include-dashboard=false"] if number == 0 else [f"--address={head}"]
                started.append(_start(node, [f"--num-cpus={num_cpus}", *words]))
                if number == 0:
                    _until(lambda: _num_nodes(nodes[0], head) == 1)
            _until(lambda: _num_nodes(nodes[0], head) == len(nodes))
            yield head
        finally:
            for process in started:
                process.terminate()
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _start(node: HostSpec, words: Sequence[str]) -> subprocess.Popen[bytes]:
    same = ["--block", "--disable-usage-stats", f"--node-ip-address={node.host}"]
    return subprocess.Popen(
        [*node.command, sys.executable, "-m", "ray.scripts.scripts", "start", *same, *words],
        env={**os.environ, **node.environment, "RAY_worker_niceness": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _num_nodes(node: HostSpec, head: str) -> int:
    look = (
        f"import ray; ray.init({head!r}, log_to_driver=False, logging_level='error');"
        " print(sum(each['Alive'] for each in ray.nodes()))"
    )
    done = subprocess.run(
        [*node.command, sys.executable, "-c", look], capture_output=True, text=True, check=False
    )
    return int(done.stdout or 0) if done.returncode == 0 else 0


def _until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + READY_S
    while not happened():
        if time.monotonic() > until:
            raise SystemExit(f"the Ray cluster was not there within {READY_S:.0f} s")
        time.sleep(0.2)


if __name__ == "__main__":
    main()

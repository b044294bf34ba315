"""Bytes that girih counts beside those that the kernel counts of every TCP connection of the run.

What begins and ends a run is left out: a run of six steps is taken from one of twelve.
"""

import pyarrow.parquet as pq
import pytest
import sent
from scenes import play_all, write

from girih.data.click_log import click_log

pytestmark = pytest.mark.slow

SIZE, STEPS = 1024, 6
UNCOUNTED = {"replicated": 3000, "split": 3000, "synchronous": 5000, "hybrid": 12_000}
"""Bytes per step, of all processes, at most: 144 of gloo with each of its messages, sizes of what follows, votes, headers of calls."""
CASES = {
    "replicated": ("substitution", ['dense="replicated"']),
    "split": ("substitution", ['dense="split"']),
    "synchronous": ("synchronous", []),
    "hybrid": ("hybrid", ["staleness=0", "transport=tcp", "embedding_servers=2"]),
}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    reason = sent.missing()
    if reason is not None:
        pytest.skip(reason)
    directory = write(tmp_path_factory.mktemp("bytes"), num_examples=1, size=SIZE, held_out=101)
    table, _ = click_log(2 * STEPS * SIZE, cardinality=20_000)
    pq.write_table(table, directory / "train.parquet")
    text = (directory / "deepfm.toml").read_text().replace("dim = 4", "dim = 32").replace("[16, 8]", "[64]")
    (directory / "deepfm.toml").write_text(text)
    scenes = [
        {
            "name": f"{name}-{steps}",
            "strategy": strategy,
            "options": options,
            "overrides": [f"train.max_steps={steps}"],
            "sent": True,
        }
        for name, (strategy, options) in CASES.items()
        for steps in (STEPS, 2 * STEPS)
    ]
    return play_all(directory, scenes, 2)


@pytest.mark.parametrize("name", CASES)
def test_bytes_counted_are_those_that_the_kernel_sent(summaries, name):
    short, long = summaries[f"{name}-{STEPS}"], summaries[f"{name}-{2 * STEPS}"]
    counted = sum(long["wire_bytes"].values()) - sum(short["wire_bytes"].values())
    measured = long["sent_bytes"] - short["sent_bytes"]
    assert counted <= measured <= counted + STEPS * UNCOUNTED[name]
    assert measured <= 1.025 * counted

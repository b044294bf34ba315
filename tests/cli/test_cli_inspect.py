"""``girih inspect``: bytes by part, on disk and in memory, of what is really there."""

import pytest

from girih import cli
from girih.app.run_config import RunConfig
from girih.store.accounting import disk_bytes
from support.store_verbs import read_snapshot


def run(*words):
    return cli.run([str(word) for word in words])


def parts_of(shown, group):
    """{part: its cells} of one table of bytes; ``all`` is its footer."""
    table = shown.split(f"bytes of {group}", 1)[1].split("└", 1)[0]
    lines = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in table.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 5}


@pytest.mark.parametrize("shards", [1, 2])
def test_bytes_by_part(log_directory, capsys, shards, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ("--set", f"store.shards={shards}")
    assert run("train", log_directory / "config.toml", "--run", log_directory / "run", *words) == 0
    capsys.readouterr()
    assert run("inspect", log_directory / "run") == 0
    shown = capsys.readouterr().out
    checkpoint = next((log_directory / "run" / "checkpoints").iterdir())
    files = [f for f in checkpoint.rglob("*.safetensors") if f.name != "dense.safetensors"]
    assert len(files) == shards
    snapshots = [read_snapshot(file) for file in files]
    description = snapshots[0].description
    rows = sum(snapshot.num_rows for snapshot in snapshots)
    parts = parts_of(shown, description["group"])
    columns = list(disk_bytes(description))
    assert len(columns) == 5 + 2 + 2 + 2 + len(["rows", "newer"]) * description["linked"]
    assert set(columns) <= set(parts)
    for name in columns:
        on_disk = sum(snapshot.column(name).nbytes for snapshot in snapshots)
        assert parts[name] == [f"{on_disk // rows}", f"{on_disk:,}", f"{on_disk // rows}", f"{on_disk:,}"]
    assert parts["neighbours"] == ["–", "–", "8", f"{8 * rows:,}"]

    config = RunConfig.load(log_directory / "run" / "config.toml")
    with config.trainer() as trainer:
        trainer.load(checkpoint, resume=False)
        stores = [store for _, store in trainer.sparse.stores()]
        for part, (_, _, _, in_memory) in parts.items():
            if part not in ("part", "all"):
                held = sum(store.memory()[part]["used"] for store in stores)
                assert in_memory == f"{held:,}", part

"""Joins KuaiRand-Pure's log with its user and video features and with what each user clicked before.

    python recipes/kuairand/prepare.py DIRECTORY

reads ``kuairand_pure/`` below ``GIRIH_DATA`` and writes train, valid and test as Parquet. A history
holds the last 50 videos that the user watched before the log begins or clicked in it, strictly
before the moment of the example: what a server would know. Outcomes (play time and the like) are left out.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict, deque
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

HISTORY = 50
LOG_COLUMNS = [
    "user_id",
    "video_id",
    "date",
    "hourmin",
    "time_ms",
    "is_click",
    "is_like",
    "long_view",
    "duration_ms",
    "tab",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory
    source = Path(os.environ.get("GIRIH_DATA", "../shared/data")) / "kuairand_pure"
    if not source.is_dir():
        parser.exit(
            2, f"{source}: no such directory; set GIRIH_DATA to the directory that has {source.name}/\n"
        )
    target.mkdir(parents=True, exist_ok=True)
    users = _integers(pq.read_table(source / "user_features.parquet"))
    videos = _integers(pq.read_table(source / "video_features_basic.parquet"))
    videos = videos.select(
        ["video_id", "author_id", "video_type", "upload_dt", "upload_type", "music_id", "music_type", "tag"]
    )
    before = pq.read_table(source / "user_history_until_0424.parquet", columns=["user_id", "watch_seq"])
    watched = {row["user_id"]: row["watch_seq"] for row in before.to_pylist()}
    histories: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=HISTORY))
    for user, seen in watched.items():
        histories[user].extend(seen)
    for split in ("train", "valid", "test"):
        log = pq.read_table(source / f"{split}.parquet", columns=LOG_COLUMNS).sort_by("time_ms")
        log = log.append_column("clicked", _histories(log, histories))
        joined = _join(_join(log, users, "user_id"), videos, "video_id").sort_by("time_ms")
        pq.write_table(_derive(joined), target / f"{split}.parquet", row_group_size=50_000)
        print(f"{split}: {joined.num_rows:,} rows")


def _integers(table: pa.Table) -> pa.Table:
    """Category codes that were stored as floats, as the integers they are."""
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(index, field.name, pc.cast(table.column(index), pa.int64()))
    return table


def _histories(log: pa.Table, histories: defaultdict[int, deque[int]]) -> pa.Array:
    """The history at each row; clicks enter it once time has moved on."""
    columns = (log.column(name).to_pylist() for name in ("user_id", "video_id", "time_ms", "is_click"))
    result, waiting, now = [], [], None
    for user, video, time_ms, click in zip(*columns, strict=True):
        if time_ms != now:
            for clicker, clicked in waiting:
                histories[clicker].append(clicked)
            waiting, now = [], time_ms
        result.append(list(histories[user]))
        if click:
            waiting.append((user, video))
    for clicker, clicked in waiting:
        histories[clicker].append(clicked)
    return pa.array(result, pa.list_(pa.int64()))


def _join(log: pa.Table, features: pa.Table, key: str) -> pa.Table:
    """A left join that keeps list columns, which Arrow's own join refuses."""
    rows = pc.index_in(log.column(key), value_set=features.column(key).combine_chunks())
    for name in features.column_names:
        if name != key:
            log = log.append_column(name, features.column(name).combine_chunks().take(rows.combine_chunks()))
    return log


def _derive(table: pa.Table) -> pa.Table:
    hours = pc.divide(table.column("hourmin"), 100)
    days = [
        None
        if uploaded is None
        else (date(day // 10000, day // 100 % 100, day % 100) - date.fromisoformat(uploaded)).days
        for day, uploaded in zip(
            table.column("date").to_pylist(), table.column("upload_dt").to_pylist(), strict=True
        )
    ]
    table = table.append_column("hour", hours).append_column("video_age_days", pa.array(days, pa.int64()))
    return table.drop_columns(["upload_dt", "hourmin", "date"])


if __name__ == "__main__":
    main()

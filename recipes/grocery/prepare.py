"""Makes examples of Amazon's grocery reviews: which of two items does a user buy next?

    python recipes/grocery/prepare.py DIRECTORY

reads ``amazon_grocery/`` below ``GIRIH_DATA`` and writes train, valid and test as Parquet. Each purchase but
a user's first is a click, with what the user bought before as history (the last 50 items); beside it stands an
item that the user never bought, drawn evenly, as none (so are DIEN's experiments made). A user's last purchase is
for the test, the one before it for validation.

The graph of ATBRG is made here too. Items are joined with those that were bought with them; of these neighbours only
those stay which two items of an example, its target and its history, have in common (graph connect and graph
prune), at most 2 of each item, and 0 stands for none. What was bought together is a snapshot that Amazon took later,
so it may know the purchases to predict.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import random
from ast import literal_eval
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HISTORY, NEIGHBOURS, SEED = 50, 2, 1
IDS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    {
        "user_id": pa.int64(),
        "item_id": pa.int64(),
        "category": pa.int64(),
        "bought": IDS,
        "bought_category": IDS,
        "with_item": IDS,
        "with_bought": IDS,
        "label": pa.int8(),
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory
    source = Path(os.environ.get("GIRIH_DATA", "../shared/data")) / "amazon_grocery"
    if not source.is_dir():
        parser.exit(
            2, f"{source}: no such directory; set GIRIH_DATA to the directory that has {source.name}/\n"
        )
    target.mkdir(parents=True, exist_ok=True)
    items = {int(row["item_id"]): row for row in read(source / "item_meta.csv.gz")}
    categories = {item: int(row["i_category"]) for item, row in items.items()}
    bought_with = {item: literal_eval(row["r_complement"]) for item, row in items.items()}
    draw, list_of_items = random.Random(SEED), sorted(items)
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "valid": [], "test": []}
    for user, purchases in purchases_of(source / "train.csv.gz").items():
        for place in range(1, len(purchases)):
            part = {len(purchases) - 1: "test", len(purchases) - 2: "valid"}.get(place, "train")
            history = purchases[max(0, place - HISTORY) : place]
            for item, label in ((purchases[place], 1), (another(list_of_items, purchases, draw), 0)):
                of_item, *of_history = neighbours([item, *history], bought_with)
                parts[part].append(
                    {
                        "user_id": user,
                        "item_id": item,
                        "category": categories.get(item, -1),
                        "bought": history,
                        "bought_category": [categories.get(each, -1) for each in history],
                        "with_item": of_item,
                        "with_bought": [each for own in of_history for each in own],
                        "label": label,
                    }
                )
    for part, rows in parts.items():
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), target / f"{part}.parquet", row_group_size=20_000)
        print(f"{part}: {len(rows):,} rows")


def read(path: Path) -> Iterator[dict[str, str]]:
    """The lines of a table with tabs."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t")


def purchases_of(path: Path) -> dict[int, list[int]]:
    """What each user bought, in the order of time; purchases of one day stay in the file's order."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for row in sorted(read(path), key=lambda row: int(row["time"])):
        found[int(row["user_id"])].append(int(row["item_id"]))
    return found


def another(items: list[int], purchases: list[int], draw: random.Random) -> int:
    """An item that is not among a user's purchases."""
    while (item := draw.choice(items)) in purchases:
        pass
    return item


def neighbours(nodes: list[int], bought_with: dict[int, list[int]]) -> list[list[int]]:
    """The neighbours of each item of an example that another of them has too: ``NEIGHBOURS`` ids each, 0 for none."""
    own = [bought_with.get(node, []) for node in nodes]
    shared = Counter(entity for entities in own for entity in set(entities))
    kept = [[entity for entity in entities if shared[entity] > 1][:NEIGHBOURS] for entities in own]
    return [entities + [0] * (NEIGHBOURS - len(entities)) for entities in kept]


if __name__ == "__main__":
    main()

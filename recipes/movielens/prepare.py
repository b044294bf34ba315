"""MovieLens-1M as ENSFM (Chen et al., WWW 2020) splits it: each user's last film is the test, all before it training.

    python recipes/movielens/prepare.py DIRECTORY

reads ``ml-1m_implicit/`` below ``GIRIH_DATA`` (its ``train.csv.gz`` and ``test.csv.gz`` have lines of
``user-gender-age-occupation,item-genre``) and writes train.parquet, test.parquet, and items.parquet with each film once,
beside some user's columns, which nobody asks for. All that a user has seen has the label 1: there are no other examples.
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ("user", "gender", "age", "occupation", "item", "genre")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    target = parser.parse_args().directory
    source = Path(os.environ.get("GIRIH_DATA", "../shared/data")) / "ml-1m_implicit"
    if not source.is_dir():
        parser.exit(
            2, f"{source}: no such directory; set GIRIH_DATA to the directory that has {source.name}/\n"
        )
    target.mkdir(parents=True, exist_ok=True)
    parts = {split: read(source / f"{split}.csv.gz") for split in ("train", "test")}
    every = np.concatenate([parts["train"], parts["test"]])
    _, first = np.unique(every[:, COLUMNS.index("item")], return_index=True)
    for split, rows in (parts | {"items": every[first]}).items():
        table = pa.table({name: rows[:, place] for place, name in enumerate(COLUMNS)})
        table = table.append_column("seen", pa.array(np.ones(len(rows), np.int8)))
        pq.write_table(table, target / f"{split}.parquet", row_group_size=100_000)
        print(f"{split}: {len(rows):,} rows")


def read(path: Path) -> np.ndarray:
    """int64[rows, 6]: the numbers of each line."""
    with gzip.open(path, "rt") as file:
        text = file.read().replace("-", " ").replace(",", " ")
    return np.array(text.split(), dtype=np.int64).reshape(-1, len(COLUMNS))


if __name__ == "__main__":
    main()

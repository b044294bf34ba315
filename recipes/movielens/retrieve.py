"""Finds each user's held-out film among all films, with the towers of a run: hit rate, NDCG and MRR.

    python recipes/movielens/retrieve.py RUN [RUN ...]

The protocol is ENSFM's (Chen et al., WWW 2020, and its code): one film a user is held out, the last; all films are ranked but
those that the user has in the training data; HR@k is recall@k, for one film is to be found. A tie counts against the
model. ENSFM is published with HR@5 0.0601, HR@10 0.1024, HR@20 0.1690 on this split.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from girih.cli.final_model import load_trainer
from girih.serving.opening import open_config

AT = (5, 10, 20)
BLOCK = 512  # users at a time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    print("| run | " + " | ".join(f"HR@{k}" for k in AT) + " | NDCG@10 | MRR |")
    print("|---|" + "---|" * (len(AT) + 2))
    for run in parser.parse_args().runs:
        ranks = held_out_ranks(run)
        hits = [float(np.mean(ranks <= k)) for k in AT]
        ndcg = float(np.mean(np.where(ranks <= 10, 1 / np.log2(ranks + 1.0), 0.0)))
        values = [*hits, ndcg, float(np.mean(1 / ranks))]
        print(f"| {run.name} | " + " | ".join(f"{value:.4f}" for value in values) + " |")


def held_out_ranks(run: Path) -> NDArray[np.int64]:
    """The place of each test user's film among those that the user has not seen, from 1 on: int64[users]."""
    settings = open_config(run)
    data = Path(os.environ["MOVIELENS"])
    tables = {
        name: pq.read_table(data / f"{name}.parquet", columns=["user", "item"])
        for name in ("train", "test", "items")
    }
    with load_trainer(run, settings) as trainer:
        outputs = {
            name: trainer.outputs(settings.dataset("test", (str(data / f"{name}.parquet"),), shuffle=False))
            for name in ("test", "items")
        }
    users, films = np.split(outputs["test"], 2, axis=1)[0], np.split(outputs["items"], 2, axis=1)[1]
    known = tables["items"]["item"].to_numpy()  # ascending
    column = np.searchsorted(known, tables["train"]["item"].to_numpy())
    order = np.argsort(tables["test"]["user"].to_numpy(), kind="stable")
    names = tables["test"]["user"].to_numpy()[order]
    row = order[np.searchsorted(names, tables["train"]["user"].to_numpy())]
    wanted = np.searchsorted(known, tables["test"]["item"].to_numpy())
    ranks = np.empty(len(users), np.int64)
    by_row = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[by_row], np.arange(0, len(users) + BLOCK, BLOCK))
    for block, first in enumerate(range(0, len(users), BLOCK)):
        scores = users[first : first + BLOCK] @ films.T
        own = scores[np.arange(len(scores)), wanted[first : first + BLOCK]].copy()
        seen = by_row[bounds[block] : bounds[block + 1]]
        scores[row[seen] - first, column[seen]] = -np.inf
        scores[np.arange(len(scores)), wanted[first : first + BLOCK]] = own  # seen before, perhaps, and again
        ranks[first : first + BLOCK] = (scores >= own[:, None]).sum(axis=1)
    return ranks


if __name__ == "__main__":
    main()

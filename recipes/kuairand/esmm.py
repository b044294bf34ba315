"""ESMM (Ma et al., SIGIR 2018) on KuaiRand-Pure: a video is clicked, and watched long.

    python recipes/kuairand/prepare.py DIRECTORY
    python recipes/kuairand/esmm.py DIRECTORY [--seeds 3]

trains ``esmm`` on all impressions, and beside it what it was made against: a network for the click, and one for the long
view that is trained on clicks alone (``labels.mask``) and asked about all impressions. Said is the test AUC of the click, of
click-and-long-view (pCTCVR: the product of both networks for the baseline) over all impressions, and of the long view over
clicked ones. Three long views in a thousand have no click in the log; pCTCVR is judged by those that have.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from girih.app.run_config import RunConfig
from girih.metrics import Scores

CONFIG = Path(__file__).with_name("kuairand.toml")
MLP = "hidden = [200, 80], dropout = 0.2"
VARIANTS = {
    "esmm": [f"model = {{name = 'esmm', {MLP}}}", 'labels = {names = ["is_click", "clicked_long"]}'],
    "click alone": [f"model = {{name = 'dnn', {MLP}}}"],
    "long view of clicks": [
        f"model = {{name = 'dnn', {MLP}}}",
        'labels = {names = ["long_view"], mask = {long_view = "is_click"}}',
    ],
}
"""Overrides of ``kuairand.toml``."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="what prepare.py wrote")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    for split in ("train", "valid", "test"):
        if not (arguments.directory / f"{split}.parquet").exists():
            print(f"{arguments.directory}: no {split}.parquet; run prepare.py first", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as directory:
        for split in ("train", "valid", "test"):
            _with_product(arguments.directory / f"{split}.parquet", Path(directory, f"{split}.parquet"))
        os.environ["KUAIRAND"] = directory
        found = [scores(seed, arguments.epochs) for seed in range(1, 1 + arguments.seeds)]
    print("| | pCTR, all | pCTCVR, all | pCVR, clicked |\n|---|---|---|---|")
    for name in found[0]:
        print(
            f"| {name} | " + " | ".join(_spread([each[name][n] for each in found]) for n in range(3)) + " |"
        )
    return 0


def scores(seed: int, epochs: int) -> dict[str, tuple[float, float, float]]:
    """Test AUCs of ESMM, and of two networks: of pCTR and pCTCVR over all impressions, of pCVR over clicked ones."""
    predicted = {name: predictions(VARIANTS[name], seed, epochs) for name in VARIANTS}
    test = pq.read_table(Path(os.environ["KUAIRAND"], "test.parquet"))
    click, both = (test[name].to_numpy() for name in ("is_click", "clicked_long"))
    clicked = click == 1
    found = {}
    ctr, cvr = predicted["click alone"][:, 0], predicted["long view of clicks"][:, 0]
    product = predicted["esmm"][:, 1]
    for name, (a, ab, b) in {
        "esmm": (predicted["esmm"][:, 0], product, product / predicted["esmm"][:, 0]),
        "two networks": (ctr, ctr * cvr, cvr),
    }.items():
        found[name] = (_auc(a, click), _auc(ab, both), _auc(b[clicked], both[clicked]))
    return found


def predictions(overrides: list[str], seed: int, epochs: int) -> NDArray[np.float32]:
    """Trains without histories; returns the predictions for the test data, float32[n, T]."""
    settings = RunConfig.load(
        CONFIG,
        overrides=[
            *(each.replace(" = ", "=", 1) for each in overrides),
            f"train.seed={seed}",
            f"train.epochs={epochs}",
        ],
    )
    features = [feature for feature in settings.schema.features if feature.name != "clicked"]
    settings = replace(settings, schema=type(settings.schema)(features, settings.schema.labels))
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"), epochs=epochs)
        found: NDArray[np.float32] = trainer.predict(settings.dataset("test"))
    return found


def _with_product(source: Path, target: Path) -> None:
    """The same data with the label that ESMM's second output has: clicked, and watched long."""
    table = pq.read_table(source)
    both = table["is_click"].to_numpy() * table["long_view"].to_numpy()
    pq.write_table(table.append_column("clicked_long", pa.array(both)), target, row_group_size=50_000)


def _auc(predicted: NDArray[np.float32], labels: NDArray[np.int8]) -> float:
    judged = Scores()
    judged.add(predicted, labels.astype(np.float32))
    return judged.result(["label"]).auc or 0.0


def _spread(values: list[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"


if __name__ == "__main__":
    sys.exit(main())

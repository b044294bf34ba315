"""Tests of every feed, to subclass: ``class TestMine(FeedSuite)`` with a ``make``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import girih
from girih.data import Batch, Dataset, NormalizationStats, Position
from girih.data.click_log import click_log
from girih.training.feeds import ExampleFeed, TrainingFeed

ROWS, BATCH_SIZE = 500, 64


def feed_schema() -> girih.Schema:
    """Two features of the click log."""
    return girih.Schema([girih.Categorical(name=name, dim=4) for name in ("user", "item")], labels="click")


class FeedSuite:
    """Tests of a feed of one trainer, who gets all examples."""

    def make(self) -> ExampleFeed:
        """A feed of the features of ``feed_schema()``."""
        raise NotImplementedError

    def test_an_epoch_comes_once_and_goes_on_from_every_position(self, tmp_path: Path) -> None:
        data, feed = dataset(tmp_path), self.make()
        training = feed.train(data, NormalizationStats.empty(data.schema))
        whole = read(training, 0, None)
        assert sum(batch.num_examples for batch, _ in whole) == ROWS
        for number, (_, position) in enumerate(whole[:-1], 1):
            rest = read(training, 0, Position.from_dict(position.to_dict()))
            assert [labels_of(batch) for batch, _ in rest] == [
                labels_of(batch) for batch, _ in whole[number:]
            ]
            assert [each.to_dict() for _, each in rest] == [each.to_dict() for _, each in whole[number:]]
        assert whole[-1][1].epoch == 1
        training.close()
        feed.end_training()

    def test_epochs_are_shuffled_and_come_again_as_they_were(self, tmp_path: Path) -> None:
        data, feed = dataset(tmp_path), self.make()
        training = feed.train(data, NormalizationStats.empty(data.schema))
        first, second, again = (
            [x for batch, _ in read(training, epoch, None) for x in labels_of(batch)] for epoch in (0, 1, 0)
        )
        assert first == again
        assert first != second
        assert sorted(first) == sorted(second)
        training.close()
        feed.end_training()

    def test_a_pass_ends_early(self, tmp_path: Path) -> None:
        data, feed = dataset(tmp_path), self.make()
        training = feed.train(data, NormalizationStats.empty(data.schema))
        whole = read(training, 0, None)
        stream = training.stream(0, None)
        batch, _ = next(stream)
        stream.close()
        assert labels_of(batch) == labels_of(whole[0][0])
        assert len(read(training, 0, None)) == len(whole)
        training.close()
        feed.end_training()

    def test_evaluation_reads_in_file_order(self, tmp_path: Path) -> None:
        data, feed = dataset(tmp_path).in_order(), self.make()
        expected = np.concatenate([batch.ids for batch, _ in data.batches(0)])
        for whole in (False, True):
            found = list(feed.evaluate(data, NormalizationStats.empty(data.schema), whole=whole))
            np.testing.assert_array_equal(np.concatenate([batch.ids for batch in found]), expected)

    def test_the_only_trainer_scores_by_any_feature(self, tmp_path: Path) -> None:
        feed = self.make()
        assert feed.schema_of(dataset(tmp_path)) == feed_schema()
        assert all(feed.scores(name) for name in (None, "user", "item"))


def dataset(directory: Path) -> Dataset:
    """A click log in a file."""
    path = directory / "log.parquet"
    if not path.exists():
        pq.write_table(click_log(ROWS, cardinality=50)[0], path, row_group_size=128)
    return girih.read_parquet(path, feed_schema(), batch_size=BATCH_SIZE, shuffle=True, shuffle_rows=200)


def read(training: TrainingFeed, epoch: int, position: Position | None) -> list[tuple[Batch, Position]]:
    """All batches of a pass."""
    stream = training.stream(epoch, position)
    found = list(stream)
    stream.close()
    return found


def labels_of(batch: Batch) -> list[float]:
    """The labels of a batch."""
    return [float(label) for label in batch.labels[:, 0]]

"""Feeds by the same suite."""

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from girih import models
from girih.comm.service import listen
from girih.errors import ConfigError
from girih.models import needs_of
from girih.services.loader import Loader
from girih.sparse.protocol import BatchCodec
from girih.training.feeds import ExampleFeed, FeatureFeed, LoaderFeed
from support.feed_suite import FeedSuite, dataset, feed_schema

SECRET = b"of this run"


class Alone:
    """The only trainer."""

    first, rank, size = True, 0, 1


class TestExamples(FeedSuite):
    def make(self):
        return ExampleFeed(Alone())


class TestFeatures(FeedSuite):
    def make(self):
        return FeatureFeed(Alone(), [feature.name for feature in feed_schema().features])


class TestLoader(FeedSuite):
    """A loader in a thread, and a worker that takes all ids under one number."""

    @pytest.fixture(autouse=True)
    def _stack(self):
        with ExitStack() as self.stack:
            yield

    def make(self):
        schema = feed_schema()
        codec = BatchCodec.of(schema, needs_of(models.DNN(schema, hidden=(2,)), schema))
        worker = self.stack.enter_context(
            listen(lambda request: request.reply((1,)), address="shm://", secret=SECRET)
        )
        loading = ExitStack()
        self.stack.push(loading)

        def start(data):
            stop, told, address = threading.Event(), threading.Event(), []
            loader = Loader(
                data=data, codec=codec, index=0, trainers=(0,), num_trainers=1, workers=(worker.address,), address="shm://", secret=SECRET
            )  # fmt: skip
            thread = threading.Thread(
                target=loader.run, args=(lambda a: (address.append(a), told.set()), stop)
            )
            thread.start()
            loading.callback(thread.join, 20)
            loading.callback(stop.set)
            assert told.wait(20)
            return address

        return LoaderFeed(Alone(), start, loading.close, SECRET)


def test_a_feed_of_columns_refuses_rows_that_others_would_not_skip(tmp_path):
    feed = FeatureFeed(type("OfTwo", (Alone,), {"size": 2})(), ["user"])
    data = replace(dataset(tmp_path), on_bad_row="skip")
    with pytest.raises(ConfigError, match=r"data\.on_bad_row = 'skip'"):
        feed.schema_of(data)

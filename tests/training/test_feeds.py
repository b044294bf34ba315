"""Feeds by the same suite."""

from girih.testing.feed_suite import FeedSuite, feed_schema
from girih.training.feeds import ExampleFeed, FeatureFeed


class Alone:
    """The only trainer."""

    first, rank, size = True, 0, 1


class TestExamples(FeedSuite):
    def make(self):
        return ExampleFeed(Alone())


class TestFeatures(FeedSuite):
    def make(self):
        return FeatureFeed(Alone(), [feature.name for feature in feed_schema().features])

"""A run that publishes while its processes are scaled."""

import threading

import pytest
from following import assert_is, follower

import girih
from girih.checkpoint import find
from girih.lifecycle import rescaling
from girih.lifecycle.run import TrainingRun
from girih.publishing.segment import LogSegment
from girih.runs import scale_requests
from girih.runs.callbacks import Callback
from girih.training.publisher import Publisher

OPTIONS = [
    "data.batch_size=64", "train.max_steps=10", "train.log_every_steps=1", "store.shards=1", "strategy.staleness=0",
    "strategy.embedding_servers=1", "publish.every_steps=1",
]  # fmt: skip


class Scales(Callback):
    """Asks for a scaling behind a step."""

    def __init__(self, run, counts):
        self.run, self.counts = run, counts

    def on_metrics(self, record):
        if record["step"] == 3 and self.counts:
            scale_requests.ask(self.run, self.counts)
            self.counts = None


@pytest.mark.heavy
@pytest.mark.parametrize("counts", [{"embedding-server": 2}, {"embedding-worker": 2}])
def test_a_segment_on_its_way_is_written_before_processes_change(config, tmp_path, monkeypatch, counts):
    write, begin, publish, rescale = (
        LogSegment.write,
        Publisher.begin,
        Publisher.run,
        TrainingRun._rescale,
    )
    sent, run, log = threading.Event(), tmp_path / "run", tmp_path / "log"

    def slowly(self):
        assert self._fields["previous"] is None or sent.wait(60)
        return write(self)

    def once_it_is_open(self, step):
        begin(self, step)
        if self._opening is not None:
            self._opening.result()

    def past_all_rows(self, state):
        publish(self, state)
        for future, segment in list(self._writes.values()):
            if segment._fields["previous"] is None:
                future.exception()

    def scale(self, scaling):
        threading.Timer(3.0, sent.set).start()
        rescale(self, scaling)

    monkeypatch.setattr(rescaling, "LOOK_S", 0.0)
    monkeypatch.setattr(LogSegment, "write", slowly)
    monkeypatch.setattr(Publisher, "begin", once_it_is_open)
    monkeypatch.setattr(Publisher, "run", past_all_rows)
    monkeypatch.setattr(TrainingRun, "_rescale", scale)
    overrides = [*OPTIONS, f"publish.to={log}"]
    with girih.Trainer.from_config(
        config, overrides, strategy="hybrid", run=run, callbacks=[Scales(run, counts)], progress=False
    ) as trainer:
        trainer.fit()
        told = trainer.summary(None, duration_s=1.0)["published"]
    (scaled,) = scale_requests.history(run)
    assert list(scaled["roles"]) == list(counts)
    assert told["failed"] == 0
    found = follower(log, tmp_path / "followed")
    assert found.poll(), found.lines
    assert found.current.step == 10
    assert_is(found.current, tmp_path / "followed", find(run).local)

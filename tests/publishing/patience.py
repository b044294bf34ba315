"""Runs that wait for each segment: none is skipped, however fast steps are and however slow what is written."""

import contextlib


def patient(Publisher, TrainingRun):
    """(class, method, what it is to be) of a run that waits."""
    begin, publish, run_publish = Publisher.begin, Publisher.publish, TrainingRun._publish

    def patiently_begin(self, step):
        begin(self, step)
        if self._opening is not None:
            with contextlib.suppress(Exception):  # tried again, and told, by the run
                self._opening.result()

    def patiently(self, *given, **options):
        publish(self, *given, **options)
        self.wait()

    def when_rows_are_free(self):
        self.checkpoints.settle(wait=True)
        run_publish(self)

    return [
        (Publisher, "begin", patiently_begin),
        (Publisher, "publish", patiently),
        (TrainingRun, "_publish", when_rows_are_free),
    ]

"""Runs that wait for each segment: none is skipped, however fast steps are and however slow what is written."""

import contextlib


def patient(Publisher):
    """(method, what it is to be) of a publisher that waits."""
    begin, run = Publisher.begin, Publisher.run

    def patiently_begin(self, step):
        begin(self, step)
        if self._opening is not None:
            with contextlib.suppress(Exception):  # tried again, and told, by the run
                self._opening.result()

    def patiently(self, state):
        self._checkpoints.settle(wait=True)  # which hold the rows
        run(self, state)
        self.settle(wait=True)

    return [("begin", patiently_begin), ("run", patiently)]

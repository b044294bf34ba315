"""Shifts the wall clock of processes that a test starts with this directory on their path, by ``GIRIH_TEST_SHIFT_S`` seconds."""

import os
import time

_true = time.time
time.time = lambda: _true() + float(os.environ.get("GIRIH_TEST_SHIFT_S", "0"))

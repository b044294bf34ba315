"""The schedule with fakes of both halves: order, staleness, refusal, and what is let go of."""

import pytest

from girih.errors import GirihError, NonFiniteError
from girih.runs.stats import Spans
from girih.testing.fakes import FakeBatch, FakeDense, FakeSparse
from girih.training.schedules import Pipelined, in_step

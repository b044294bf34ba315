"""Numbers that are to change by themselves, and cannot: refused before the run begins."""

from types import SimpleNamespace

import pytest
from test_rescaling import context_of, facts_of

import girih
from girih.cluster.options import ClusterOptions
from girih.errors import ConfigError
from girih.lifecycle.rescaling import Rescaling


def made(tmp_path, strategy, bounds, *, held=False, may_grow=True):
    options = ClusterOptions(autoscale=bounds)
    context = context_of(tmp_path, SimpleNamespace(options=options, may_grow=may_grow))
    return Rescaling(context, strategy, facts_of(strategy), held=held).autoscaler


@pytest.mark.parametrize(("strategy", "bounds", "others", "told"), [
    ("hybrid", {"group-server": (1, 2)}, {}, "strategy 'hybrid' cannot change its number of group-server processes"),
    ("local", {"embedding-worker": (1, 2)}, {}, "strategy 'local' cannot change its number of embedding-worker .*; it cannot be scaled"),
    ("synchronous", {"trainer": (1, 2)}, {}, "a change of the number of trainers restarts them, so it is never automatic"),
    ("hybrid", {"trainer": (1, 2)}, {}, "a change of the number of trainers restarts them"),
    ("hybrid", {"loader": (1, 3)}, {}, "loaders = 3: expected at most one per trainer"),
    ("hybrid", {"embedding-worker": (1, 2)}, {"held": True}, "the run has a plan"),
    ("hybrid", {"embedding-worker": (1, 2)}, {"may_grow": False}, "each process has a fixed host, for example under --cluster"),
])  # fmt: skip
def test_what_cannot_change_by_itself_is_refused(tmp_path, strategy, bounds, others, told):
    kinds = {"hybrid": girih.Hybrid, "local": girih.Local, "synchronous": girih.Synchronous}
    with pytest.raises(ConfigError, match=f"cluster: autoscale: .*{told}"):
        made(tmp_path, kinds[strategy](), bounds, **others)


def test_it_is_made_where_it_is_asked_for_and_the_run_has_a_directory(tmp_path):
    strategy = girih.Hybrid()
    assert made(tmp_path, strategy, {}) is None
    assert made(tmp_path, strategy, {"embedding-worker": (1, 2), "embedding-server": (1, 4)}) is not None
    with pytest.raises(ConfigError, match="a run directory is needed"):
        made(None, strategy, {"embedding-worker": (1, 2)})

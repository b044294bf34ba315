"""Training steps that torch compiles: equal to those that it does not, in one graph for all sizes, and refused in one line."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import girih
from companions import together
from girih.data.batch import share_of
from girih.dense.accel import compiled
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.replica import Replica
from girih.errors import ConfigError
from girih.models.embeddings import Jagged
from support.dense_suite import SLICES, CountingDeepFM, case, dense_schema, dense_spec, in_parts
from support.votes import apply

# of torch's own tracing of autograd functions
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
SIZES = (6, 9, 1, 7)


class Graphs:
    """Stands for inductor: forward and backward are traced as for it, and computed operator by operator.

    Attributes:
        modes: what it was told with each graph of a forward pass.
    """

    def __init__(self):
        self.modes = []

    def __call__(self, graph, inputs, mode=None):
        from torch._dynamo.backends.debugging import aot_eager

        self.modes.append(mode)
        return aot_eager(graph, inputs)


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    monkeypatch.setattr(compiled, "BACKEND", found)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def steps(half, sizes=SIZES):
    """What steps of several sizes left of losses, rows' gradients and parameters."""
    found = []
    for seed, size in enumerate(sizes):
        one = case(seed, size)
        embeddings = one.embeddings()
        computed = half.compute(one.batch, embeddings)
        apply(computed)
        found += [computed.vote.loss.clone(), *(each.grad for each in embeddings.tensors())]
    return [*found, *half.module.state_dict().values()]


@pytest.mark.parametrize("deferred", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_steps_of_all_sizes_are_those_that_are_not_compiled(deferred, graphs):
    half = Replica(replace(dense_spec(), compile=True, deferred=deferred))
    torch.testing.assert_close(steps(half), steps(Replica(replace(dense_spec(), deferred=deferred))))
    assert graphs.modes == [None]
    times = half.stats_of_process.spans.totals_s
    assert times["compile"] > times["forward"]


def test_dlrm_and_micro_batches(graphs):
    def made(compile):
        torch.manual_seed(1)
        model = girih.models.DLRM(dense_schema(), hidden=(8,), bottom_hidden=(6,))
        return Replica(replace(dense_spec(), module=model, compile=compile))

    def parts(half):
        one = case(0)
        apply(in_parts(half, one, [one.embeddings(examples) for examples in SLICES]))
        return list(half.module.state_dict().values())

    torch.testing.assert_close(parts(made(compile=True)), parts(made(compile=False)))
    assert graphs.modes == [None]


@pytest.mark.heavy
def test_bfloat16_is_that_of_autocast(graphs):
    found, expected = (
        steps(Replica(replace(dense_spec(), precision="bfloat16", compile=each)), (6, 8))
        for each in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_evaluation_is_not_compiled(graphs):
    half = Replica(replace(dense_spec(), compile=True))
    one = case(0)
    torch.testing.assert_close(
        half.predict(one.batch, one.embeddings()), Replica(dense_spec()).predict(one.batch, one.embeddings())
    )
    assert not graphs.modes


@pytest.mark.slow
def test_a_device_replays_batches_as_large_as_the_first(graphs):
    model = CountingDeepFM()
    half = Replica(replace(dense_spec(), module=model, compile=True))
    half._compiled = compiled.CompiledModel(model, replays=True)
    sizes = (6, 6, 9, 6)
    torch.testing.assert_close(steps(half, sizes), steps(Replica(dense_spec()), sizes))
    assert graphs.modes == ["reduce-overhead", None]
    # the last batch was replayed: its gradients do not stay where those of the next one will lie
    given = [torch.ones(2), None]
    kept = half._compiled.kept(given)
    assert kept[0] is not given[0]
    assert torch.equal(kept[0], given[0])
    assert kept[1] is None
    steps(half, [9])
    assert half._compiled.kept(given)[0] is given[0]


def test_whole_sequences_are_not_replayed(graphs):
    class Last(torch.nn.Module):
        def forward(self, numeric, embeddings):
            return numeric[:, :1] + embeddings.sequences["tags"].values.sum()

    embeddings = replace(
        case(0).embeddings(), sequences={"tags": Jagged(torch.ones(3, 4), torch.arange(7) // 2)}
    )
    compiled.CompiledModel(Last(), replays=True)(torch.ones(6, 2), embeddings)
    assert graphs.modes == [None]


def test_what_does_not_compile_is_one_line(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no such kernel\nand a page of source")

    monkeypatch.setattr(compiled, "BACKEND", fails)
    half = Replica(replace(dense_spec(), compile=True))
    with pytest.raises(
        ConfigError, match=r"CountingDeepFM.*no such kernel.*set train.compile = false"
    ) as found:
        steps(half)
    assert "\n" not in str(found.value)


def test_a_models_own_error_stays_what_it_is(graphs):
    class Short(torch.nn.Module):
        def forward(self, numeric, embeddings):
            if len(numeric) > 3:
                raise ValueError("too many examples")
            return numeric[:, :1]

    half = Replica(replace(dense_spec(), module=Short(), compile=True))
    with pytest.raises(ConfigError, match=r"Short.forward failed: .*too many examples"):
        steps(half)


def test_global_batch_norm_and_a_machine_without_a_compiler_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"compile = true: with global_batch_norm, .* drop one"):
        girih.TrainOptions(compile=True, global_batch_norm=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"compile = true: .*g\+\+.*set train.compile = false"):
        girih.Trainer(CountingDeepFM(), options=girih.TrainOptions(compile=True, device="cpu"))


def test_substitution_is_refused():
    options = girih.TrainOptions(compile=True, device="cpu")
    with pytest.raises(ConfigError, match=r"substitution: .*cannot be compiled.*train.compile = false"):
        girih.Trainer(CountingDeepFM(), options=options, strategy=girih.Substitution())


@pytest.fixture
def log(tmp_path):
    """Six batches of ten examples, the last one of five."""
    rng = np.random.default_rng(0)
    columns = {f.name: rng.integers(0, 9, 55) for f in dense_schema().sparse}
    columns |= {f.name: rng.normal(size=55) for f in dense_schema().numeric}
    columns["click"] = rng.integers(0, 2, 55)
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    return girih.read_parquet(tmp_path / "log.parquet", dense_schema(), batch_size=10)


@pytest.mark.slow
def test_a_run_tells_compiling_apart(log, tmp_path, graphs):
    def run(name, compile):
        options = girih.TrainOptions(compile=compile, device="cpu")
        with girih.Trainer(CountingDeepFM(), options=options, run=tmp_path / name) as trainer:
            trainer.fit(log, epochs=2)
            parameters = [p.detach().clone() for p in trainer.model.parameters()]
            return parameters, trainer._run.summary(None, 1.0), trainer._run.state.train_s

    (found, summary, train_s), (expected, plain, _) = run("compiled", True), run("plain", False)
    torch.testing.assert_close(found, expected)
    assert graphs.modes == [None]
    assert "compile" not in summary["phases_s"]
    assert summary["compile_s"] - plain["compile_s"] > train_s / 2
    assert summary["phases_s"]["forward"] <= train_s


def train(ranks, compile):
    """Steps of a trainer among others; a share of the last is empty."""
    found = Graphs()
    compiled.BACKEND = found
    half = AllReducedReplica(replace(dense_spec(), compile=compile), ranks)
    for seed, size in enumerate((8, 7, 1)):
        one = case(seed, size)
        share = share_of(one.batch, ranks.rank, ranks.size)
        begin = 0 if ranks.rank == 0 else size - share.num_examples
        computed = half.compute(share, one.embeddings(slice(begin, begin + share.num_examples)))
        apply(computed)
    return [p.detach().flatten().tolist() for p in half.module.parameters()], len(found.modes)


@pytest.mark.heavy
def test_trainers_of_a_step():
    plain, one = (together(partial(train, compile=each)) for each in (False, True))
    for (expected, _), (found, num_graphs) in zip(plain, one, strict=True):
        assert num_graphs == 1
        for own, others in zip(found, expected, strict=True):
            assert own == pytest.approx(others, rel=1e-5, abs=1e-6)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["local", "hybrid", "asynchronous"])
def test_a_run_with_inductor(strategy, log_directory):
    """In processes of its own, as a user starts them."""

    def run(name, *options):
        chosen = [
            "train.max_steps=3",
            "model.dropout=0",
            *options,
            *(["strategy.staleness=0"] if strategy != "local" else []),
        ]
        sets = [word for each in chosen for word in ("--set", each)]
        directory = log_directory / name
        words = ["train", log_directory / "config.toml", "--run", directory, "--strategy", strategy, *sets]
        subprocess.run([sys.executable, "-m", "girih", *map(str, words)], check=True, capture_output=True)
        return json.loads((directory / "summary.json").read_text())

    found, expected = run("compiled", "train.compile=true"), run("plain")
    assert found["logloss"] == pytest.approx(expected["logloss"], rel=1e-4)
    assert found["compile_s"] > expected["compile_s"] + 1

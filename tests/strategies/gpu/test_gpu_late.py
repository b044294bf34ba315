"""A step on a GPU waits for nothing, and is refused there as it is on a CPU."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from waits import MARK, TO_PAGEABLE, CountWaits, waits_by_step, waits_in

import girih
from girih.app.run_config import RunConfig
from girih.errors import NonFiniteError
from girih.kernels.gpu import jit
from support.store_verbs import by_key

GPU, CPU = 'store.tiers=["gpu"]', 'store.tiers=["dram"]'
DEVICE = "cpu" if jit.INTERPRETED else "cuda"


class Exploding(torch.nn.Module):
    """The logits of its fourth batch are NaN."""

    def __init__(self, schema):
        super().__init__()
        self.schema, self.calls = schema, 0
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(12, 1)

    def forward(self, numeric, embeddings):
        self.calls += self.training
        logits = self.linear(embeddings.concatenated())
        return logits * float("nan") if self.training and self.calls == 4 else logits


class BadGradient(torch.nn.Module):
    """A finite loss whose gradient to the embeddings is infinite: sqrt at 0."""

    def __init__(self, schema):
        super().__init__()
        self.schema = schema
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, numeric, embeddings):
        item = embeddings["item"]
        return ((item - item.detach()).sqrt().sum(1, keepdim=True)) + self.bias


def settings_of(directory, *overrides):
    return RunConfig.load(
        directory / "config.toml",
        overrides=(f"train.device={DEVICE}", "data.batch_size=32", "schedule.prefetch=false", *overrides),
    )


def trainer_of(settings, model):
    options = girih.TrainOptions(seed=3, max_steps=6, on_nonfinite="stop", device=DEVICE)
    return girih.Trainer(model(settings.schema), options=options, store=settings.store)


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which computes with numpy
def test_a_nan_refuses_the_step_and_the_run_goes_on_where_it_was(log_directory):
    found = []
    for tier in (CPU, GPU):
        settings = settings_of(log_directory, tier)
        with trainer_of(settings, Exploding) as trainer:
            with pytest.raises(NonFiniteError, match="step 4: the loss is nan"):
                trainer.fit(settings.dataset("train"))
            assert trainer.dense.deferred == (tier == GPU)
            assert (trainer.state.step, trainer.state.refused) == (4, 1)
            assert trainer.state.examples == 4 * 32
            trainer.model.calls = 4  # whether or not the step after it was launched
            trainer.fit(settings.dataset("train"))
            rows = by_key(*(store for _, store in trainer.sparse.stores()))
            found.append(
                (trainer.state.step, rows, trainer.model.linear.weight.detach().cpu().numpy().copy())
            )
    (steps, expected, weight), (other_steps, rows, other_weight) = found
    assert steps == other_steps == 6
    np.testing.assert_allclose(other_weight, weight, rtol=1e-4, atol=1e-6)
    assert rows.keys() == expected.keys()
    for key, columns in expected.items():
        for name, value in columns.items():
            if (
                np.asarray(value).dtype.kind == "f"
            ):  # not how often rows were read: the fifth batch was once in vain
                np.testing.assert_allclose(
                    rows[key][name], value, rtol=1e-3, atol=1e-5, err_msg=f"{key} {name}"
                )


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_gradient_of_rows_is_refused_and_named(log_directory):
    settings = settings_of(log_directory, GPU)
    with trainer_of(settings, BadGradient) as trainer:
        with pytest.raises(NonFiniteError, match=r"step 1: .*feature 'item'"):
            trainer.fit(settings.dataset("train"))
        assert trainer.sparse.stats().store["updates"] == 0
        assert trainer.model.bias.item() == 0.0


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "set by a mask": lambda x: x.index_put_((x > 0,), x.new_zeros(())),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
}
NOT_WAITING = {
    "gather": lambda x: x[torch.tensor([0, 2])],
    "where": lambda x: torch.where(x > 0, x, 0).cumsum(0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x, output_size=4),
    "copy": lambda x: torch.empty_like(x).copy_(x),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_counted(monkeypatch, name):
    counted = CountWaits(monkeypatch)
    WAITING[name](torch.tensor([0, 1, 3]))
    assert not counted.found  # before it is asked to
    with counted:
        WAITING[name](torch.tensor([0, 1, 3]))
    assert counted.found


@pytest.mark.smoke
@pytest.mark.parametrize("name", NOT_WAITING)
def test_what_does_not_wait_is_not_counted(monkeypatch, name):
    with CountWaits(monkeypatch) as counted:
        NOT_WAITING[name](torch.tensor([0, 1, 3]))
    assert not counted.found


@pytest.mark.smoke
def test_waits_are_found_in_a_trace_of_the_profiler():
    trace = json.loads((Path(__file__).parent / "trace.json").read_text())
    assert waits_in(trace) == {"cudaStreamSynchronize": 2, "cudaEventSynchronize": 1, TO_PAGEABLE: 1}


@pytest.mark.skipif(not jit.INTERPRETED, reason="on a GPU the profiler counts, and torch raises at a wait")
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_no_step_reads_a_value_on_the_host(log_directory, monkeypatch, on_nonfinite):
    settings = settings_of(
        log_directory,
        GPU,
        f"train.on_nonfinite={on_nonfinite}",
        "train.max_steps=8",
        "train.log_every_steps=2",
    )
    with settings.trainer() as trainer:
        by_step = waits_by_step(trainer, settings.dataset("train"), monkeypatch)
    assert len(by_step) >= 4
    # where steps may be skipped, the number of the next update is to be known
    assert all(not each for each in by_step) == (on_nonfinite == "stop"), "".join(chain(*by_step))


@pytest.mark.filterwarnings("ignore:.*rofiler")  # which may tell how its events are kept
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@pytest.mark.parametrize("strategy", ["local", "synchronous"])
def test_the_profiler_sees_no_wait_in_a_step(log_directory, tmp_path, strategy):
    settings = RunConfig.load(
        log_directory / "config.toml",
        overrides=("train.device=cuda", "data.batch_size=32", "train.epochs=1", "train.log_every_steps=100"),
        strategy=strategy,
    )
    kinds = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], acc_events=True)
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), epochs=0)
        for _, store in trainer.sparse.stores():
            store.state.memory.make_room(1 << 16)
        original, steps = trainer.dense.compute, []

        def compute(*args, **kwargs):
            steps.append(None)
            if len(steps) == 10:
                profiler.start()
            if 12 <= len(steps) <= 30:
                with torch.profiler.record_function(MARK):
                    pass
            if len(steps) == 31:
                profiler.stop()
            return original(*args, **kwargs)

        trainer.dense.compute = compute
        trainer.fit(settings.dataset("train"))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    found = waits_in(trace)
    # for what came of the step before the one just launched; and beside the steps, for the number of a later batch's keys.
    # One step reads what came of two steps if the step before read none, so the first mark may leave one more.
    assert found.keys() <= {"cudaEventSynchronize"}
    assert found["cudaEventSynchronize"] <= (30 - 12) * (1 if strategy == "local" else 2) + 1


def test_a_record_has_the_counters_of_its_step(log_directory, tmp_path):
    """Those that the device told with what came of the step, though the next one is launched by then."""
    records = []
    for tier in (CPU, GPU):
        settings = settings_of(log_directory, tier, "train.log_every_steps=2")
        options = girih.TrainOptions(
            seed=3, max_steps=6, on_nonfinite="stop", device=DEVICE, log_every_steps=2
        )
        trainer = girih.Trainer(
            Exploding(settings.schema), options=options, store=settings.store, run=tmp_path / tier[-6:-2]
        )
        with trainer, pytest.raises(NonFiniteError):
            trainer.fit(settings.dataset("train"))
        lines = (tmp_path / tier[-6:-2] / "metrics.jsonl").read_text().splitlines()
        records.append(
            [{name: json.loads(line)[name] for name in ("step", "rows", "hit_rate")} for line in lines]
        )
    assert records[0] == records[1]
    assert records[0][0]["step"] == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # which setting it says once
@pytest.mark.parametrize("strategy", ["local", "synchronous"])
def test_no_step_waits_for_the_gpu(log_directory, strategy):
    settings = RunConfig.load(
        log_directory / "config.toml",
        overrides=("train.device=cuda", "data.batch_size=32", "train.epochs=10", "train.log_every_steps=100"),
        strategy=strategy,
    )
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), epochs=0)
        for _, store in trainer.sparse.stores():
            store.state.memory.make_room(1 << 16)
        original, steps = trainer.dense.compute, []

        def compute(*args, **kwargs):
            steps.append(None)
            torch.cuda.set_sync_debug_mode("error" if 5 < len(steps) < 30 else "default")
            return original(*args, **kwargs)

        trainer.dense.compute = compute
        try:
            trainer.fit(settings.dataset("train"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(steps) > 30

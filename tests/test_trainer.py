import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import girih
from girih.app.run_config import RunConfig
from girih.errors import CheckpointError, ConfigError, NonFiniteError
from support.store_verbs import contents


def settings_of(directory, *overrides):
    return RunConfig.load(directory / "config.toml", overrides=overrides)


def state_of(trainer):
    """Everything that training moves, as comparable arrays."""
    rows = {}
    for name, store in trainer.sparse.stores():
        rows[str(name)] = contents(store)
    dense = {name: tensor.clone().numpy() for name, tensor in trainer.model.state_dict().items()}
    return rows, dense


def assert_same_state(one, other):
    (rows_a, dense_a), (rows_b, dense_b) = state_of(one), state_of(other)
    assert rows_a.keys() == rows_b.keys()
    for name in rows_a:
        for column in rows_a[name]:
            np.testing.assert_array_equal(
                rows_a[name][column], rows_b[name][column], err_msg=f"{name} {column}"
            )
    for name in dense_a:
        np.testing.assert_array_equal(dense_a[name], dense_b[name], err_msg=name)


def fit(settings, *, epochs=None, run=None):
    trainer = settings.trainer(run=run)
    trainer.fit(settings.dataset("train"), settings.dataset("valid"), epochs=epochs)
    return trainer


def test_training_learns_and_evaluation_changes_nothing(log_directory):
    settings = settings_of(log_directory, "train.epochs=3")
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), epochs=0)  # takes the moments of standardized features
        before = trainer.evaluate(settings.dataset("test"))
        trainer.fit(settings.dataset("train"))
        after = trainer.evaluate(settings.dataset("test"))
        assert before.logloss > after.logloss
        assert after.auc > 0.6
        rows = trainer.sparse.stats().rows
        assert trainer.evaluate(settings.dataset("test")) == after
        assert trainer.sparse.stats().rows == rows
        assert trainer.state.step == 3 * math.ceil(3000 / 128)
        assert trainer.state.examples == 9000


def test_a_trainer_prints_as_one_line(log_directory):
    settings = settings_of(log_directory, "train.max_steps=3")
    with settings.trainer() as trainer:
        model = type(trainer.model).__name__
        names = ", ".join(table.name for table in trainer.schema.tables)
        assert repr(trainer) == f"Trainer({model}, step 0, tables {names})"
        trainer.fit(settings.dataset("train"))
        rows = trainer.sparse.stats().rows
        assert min(rows.values()) > 0
        told = ", ".join(f"{table.name} {rows[table.name]:,} rows" for table in trainer.schema.tables)
        assert repr(trainer) == f"Trainer({model}, step 3, {told})"
    assert repr(trainer) == f"Trainer({model}, step 3, tables {names})"


def test_an_evaluation_asks_for_statistics_twice_and_tells_of_its_own_ids(log_directory, caplog, monkeypatch):
    settings, asked = settings_of(log_directory), []
    rows = pq.read_table(log_directory / "test.parquet")
    users = pa.array(np.arange(10**12, 10**12 + len(rows)))
    rows = rows.set_column(rows.column_names.index("user"), "user", users)
    pq.write_table(rows, log_directory / "new.parquet")
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        new, test = (
            girih.read_parquet(log_directory / "new.parquet", trainer.schema),
            settings.dataset("test"),
        )
        ask = trainer.sparse.stats
        monkeypatch.setattr(trainer.sparse, "stats", lambda **options: asked.append(1) or ask(**options))
        trainer.evaluate(test)
        trainer.evaluate(test)
        assert len(asked) == 4  # before and after each: a process may restart between two evaluations
        for _ in range(3):
            trainer.predict(new)
        trainer.evaluate(test)
        assert "have no row" not in caplog.text
        trainer.evaluate(new)
        assert "new.parquet: " in caplog.text


def test_two_runs_of_one_seed_are_equal_bit_for_bit(log_directory):
    settings = settings_of(log_directory)
    with fit(settings) as one, fit(settings) as other:
        assert_same_state(one, other)


def test_shards_do_not_change_results(log_directory):
    with fit(settings_of(log_directory)) as one, fit(settings_of(log_directory, "store.shards=3")) as three:
        data = settings_of(log_directory).dataset("test")
        np.testing.assert_array_equal(one.predict(data), three.predict(data))


INTERRUPTED = (
    "train.epochs=2",
    'train.lr_schedule={name="StepLR", step_size=5, gamma=0.7, interval="step"}',
    'tables=[{name="item", eviction={name="lru", max_rows=60}}]',
)


@pytest.fixture(scope="module")
def whole(log_source):
    """A run that nothing has interrupted."""
    with fit(settings_of(log_source, *INTERRUPTED)) as trainer:
        yield trainer


@pytest.mark.parametrize("stop_at", [1, 7, 24, 30])
def test_stopped_and_resumed_equals_uninterrupted(log_directory, tmp_path, whole, stop_at):
    """Steps 1 and 7 are within the first epoch, 24 is its end, 30 is in the second one."""
    settings = settings_of(log_directory, *INTERRUPTED)
    first = settings_of(log_directory, *INTERRUPTED, f"train.max_steps={stop_at}")
    run = tmp_path / "run"
    fit(first, run=run).close()
    torch.manual_seed(99)  # the state of the generator must come from the checkpoint
    with settings.trainer(run=run) as resumed:
        resumed.load(run)
        assert resumed.state.step == stop_at
        resumed.fit(settings.dataset("train"), settings.dataset("valid"), epochs=2 - resumed.state.epoch)
        assert_same_state(whole, resumed)
        assert whole.state.to_dict() | {"train_s": 0} == resumed.state.to_dict() | {"train_s": 0}


def test_checkpoint_loads_on_any_number_of_shards(log_directory, tmp_path):
    data = settings_of(log_directory).dataset("test")
    with fit(settings_of(log_directory, "store.shards=3")) as three:
        expected = three.predict(data)
        path = three.save(tmp_path / "saved")
        for shards in (1, 2, 8):
            with settings_of(log_directory, f"store.shards={shards}").trainer() as other:
                other.load(path)
                np.testing.assert_array_equal(other.predict(data), expected)


def test_early_stopping_puts_the_best_weights_back(log_directory):
    settings = settings_of(
        log_directory,
        "train.epochs=12",
        "sparse_optimizer.lr=0.1",
        "train.early_stopping={metric='logloss', patience=1}",
    )
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        state = trainer.state
        assert state.stopped_early
        assert state.bad_evaluations == 2
        assert state.best_step < state.step
        assert trainer.evaluate(settings.dataset("valid")).logloss == state.best_value


def test_early_stopping_by_a_metric_of_the_order_within_users(log_directory):
    settings = settings_of(
        log_directory,
        "train.epochs=12",
        "sparse_optimizer.lr=0.1",
        "train.gauc_by=user",
        "train.rank_at=[2, 5]",
        "train.early_stopping={metric='ndcg@5', patience=1}",
    )
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        state = trainer.state
        assert state.stopped_early
        assert trainer.evaluate(settings.dataset("valid")).first.ranking["ndcg@5"] == state.best_value


def test_plateau_lowers_both_rates(log_directory):
    settings = settings_of(
        log_directory,
        "train.epochs=3",
        'train.lr_schedule={name="ReduceLROnPlateau", factor=0.1, patience=0, threshold=1.0, threshold_mode="abs", metric="logloss"}',
    )
    with fit(settings) as trainer:
        assert trainer.learning_rate.scale() == pytest.approx(0.01)


def test_sparse_rate_follows_the_dense_one(log_directory):
    """With the rate at 0 from the second step on, rows stay where the first step left them."""
    schedule = 'train.lr_schedule={name="StepLR", step_size=1, gamma=0.0, interval="step"}'
    options = ("sparse_optimizer={name='sgd', lr=0.1}", "first_order_optimizer={name='sgd', lr=0.1}")
    one_step = settings_of(log_directory, *options, schedule, "train.max_steps=1")
    with fit(one_step) as one, fit(settings_of(log_directory, *options, schedule)) as all_steps:
        a, b = state_of(one)[1], state_of(all_steps)[1]
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


class Exploding(torch.nn.Module):
    """Multiplies by a number that becomes infinite when a feature's id is the bad one."""

    def __init__(self, schema):
        super().__init__()
        self.schema = schema
        self.linear = torch.nn.Linear(12, 1)
        self.calls = 0

    def forward(self, numeric, embeddings):
        self.calls += 1
        logits = self.linear(embeddings.concatenated())
        return logits * float("nan") if self.training and self.calls == 4 else logits


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_non_finite_loss_stops_or_is_skipped_whole(log_directory, policy):
    settings = settings_of(log_directory)
    schema = settings.schema
    options = girih.TrainOptions(on_nonfinite=policy, seed=3)
    trainer = girih.Trainer(Exploding(schema), options=options)
    data = settings.dataset("train")
    if policy == "stop":
        with pytest.raises(NonFiniteError, match="step 4"):
            trainer.fit(data)
    else:
        trainer.fit(data)
        assert trainer.state.refused == 1
        assert trainer.sparse.last_step == trainer.state.step - 1
    assert np.isfinite(trainer.model.linear.weight.detach().numpy()).all()
    trainer.close()


class BadGradient(torch.nn.Module):
    """A finite loss whose gradient to the embeddings is infinite: sqrt at 0."""

    def __init__(self, schema):
        super().__init__()
        self.schema = schema
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, numeric, embeddings):
        item = embeddings["item"]
        return (item - item.detach()).sqrt().sum(1, keepdim=True) + self.bias


def test_non_finite_gradient_names_the_feature_and_moves_nothing(log_directory):
    settings = settings_of(log_directory)
    with girih.Trainer(BadGradient(settings.schema)) as trainer:
        with pytest.raises(NonFiniteError, match=r"step 1: .*feature 'item'"):
            trainer.fit(settings.dataset("train"))
        assert trainer.sparse.stats().store["updates"] == 0
        assert trainer.model.bias.item() == 0.0


def test_bfloat16_is_close_and_parameters_stay_float32(log_directory):
    full = settings_of(log_directory, "train.epochs=2")
    half = settings_of(log_directory, "train.epochs=2", "train.precision=bfloat16")
    with fit(full) as one, fit(half) as other:
        assert {p.dtype for p in other.model.parameters()} == {torch.float32}
        difference = one.evaluate(full.dataset("test")).auc - other.evaluate(full.dataset("test")).auc
        assert abs(difference) < 0.02


def test_example_weights_and_gauc(log_directory):
    settings = settings_of(log_directory, "labels.weight=context_weight", "train.gauc_by=user")
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("train", "valid", "test"):
        table = pq.read_table(log_directory / f"{name}.parquet")
        weights = pa.array(np.random.default_rng(0).random(table.num_rows))
        pq.write_table(table.append_column("context_weight", weights), log_directory / f"{name}.parquet")
    with fit(settings) as trainer:
        metrics = trainer.evaluate(settings.dataset("test"))
        assert metrics.first.gauc is not None


def test_options_that_do_not_go_together_are_refused(log_directory):
    settings = settings_of(log_directory)
    schema, model = settings.schema, settings.model()
    train = settings.dataset("train")
    with pytest.raises(ConfigError, match="validation data"):
        girih.Trainer(model, options=girih.TrainOptions(early_stopping=girih.EarlyStopping())).fit(train)
    with pytest.raises(ConfigError, match="gauc_by = 'x0'"):
        girih.Trainer(model, options=girih.TrainOptions(gauc_by="x0"))
    with pytest.raises(ConfigError, match="run directory"):
        girih.Trainer(model, options=girih.TrainOptions(tensorboard=True))
    with pytest.raises(ConfigError, match="has no schema"):
        girih.Trainer(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module"):
        girih.Trainer("deepfm", schema=schema)
    with pytest.raises(ConfigError, match=r"girih\.optim"):
        girih.Trainer(model, sparse_optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(ConfigError, match=r"CUDA|expected"):
        girih.Trainer(model, options=girih.TrainOptions(device="tpu9"))


def test_other_schemas_and_models_are_refused(log_directory, tmp_path):
    with fit(settings_of(log_directory, "train.max_steps=2")) as trainer:
        path = trainer.save(tmp_path / "saved")
    wider = settings_of(log_directory, "model.hidden=[32, 8]")
    with wider.trainer() as trainer, pytest.raises(CheckpointError, match="does not fit this model"):
        trainer.load(path)
    text = (log_directory / "config.toml").read_text()
    (log_directory / "config.toml").write_text(text.replace("dim = 4", "dim = 8"))
    with (
        settings_of(log_directory).trainer() as trainer,
        pytest.raises(CheckpointError, match="'user' has dim 4 in the checkpoint, 8 in the configuration"),
    ):
        trainer.load(path)
    (log_directory / "config.toml").write_text(
        text.replace('name = "adam"\nlr = 0.01', 'name = "adagrad"\nlr = 0.01')
    )
    with (
        settings_of(log_directory).trainer() as trainer,
        pytest.raises(CheckpointError, match=r"adagrad|adam"),
    ):
        trainer.load(path)


def test_predictions_come_in_file_order(log_directory):
    settings = settings_of(log_directory)
    with fit(settings) as trainer:
        test = settings.dataset("test")
        predictions = trainer.predict(test)
        assert predictions.shape == (1000, 1)
        assert ((predictions > 0) & (predictions < 1)).all()
        np.testing.assert_array_equal(predictions, trainer.predict(test.with_batch_size(1000)))

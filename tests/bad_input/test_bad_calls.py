"""Calls of the Python API that cannot be served: the documented error, in one line that tells."""

import re

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from bad_site import TRAINED, changed
from torch import nn

import girih
from girih import errors

USER, PRICE = girih.Categorical(name="user", dim=4), girih.Numeric(name="price", transform="standardize")
SCHEMA = girih.Schema([USER, PRICE], "click")
OTHER = girih.Schema([girih.Categorical(name="user", dim=8), PRICE], "click")


def read(site, schema=SCHEMA, **options):
    return girih.read_parquet(site / "train.parquet", schema, **options)


def trainer(schema=SCHEMA, **options):
    return girih.Trainer(girih.models.LR(schema), **options)


SCHEMAS = [
    (lambda: girih.Schema([], "click"), "features: the list is empty"),
    (lambda: girih.Schema(USER, "click"), "is not a Categorical or Sequence or Numeric; expected a list"),
    (lambda: girih.Schema(["user"], "click"), "features: 'user' is not a Categorical or Sequence"),
    (lambda: girih.Schema([USER], "click", ["user"]), "tables: 'user' is not a Table; expected a list"),
    (lambda: girih.Schema([USER], 5), "labels: names = 5: expected a list"),
    (lambda: girih.Schema([USER], []), "labels: names is empty; expected at least one label"),
    (lambda: girih.Schema([USER, USER], "click"), "feature 'user' is listed 2 times; names must differ"),
    (lambda: girih.Schema([USER], "user"), "feature 'user' reads the label 'user'"),
    (lambda: girih.Schema([USER], "click", [girih.Table(name="usr")]), "table 'usr' is used by no feature; did"),
    (lambda: girih.Categorical(name=""), "name = '': expected a non-empty string"),
    (lambda: girih.Categorical(name="user", dim=0), "feature 'user': dim = 0: expected an integer from 1"),
    (lambda: girih.Categorical(name="user", dim="4"), "feature 'user': dim = '4': expected an integer"),
    (lambda: girih.Categorical(name="user", pooling="max"), "pooling = 'max': expected one of 'sum', 'mean', 'sqrtn'"),
    (lambda: girih.Categorical(name="user", max_length="9"), "max_length = '9': expected an integer of at least"),
    (lambda: girih.Categorical(name="user", bucketize="1,2"), "bucketize = '1,2': expected rising, finite bound"),
    (lambda: girih.Categorical(name="user", bucketize=3), "bucketize = 3: expected rising, finite boundaries"),
    (lambda: girih.Numeric(name="price", transform="sqrt"), "transform = ('sqrt',): expected one of 'log1p', 'standardize'"),
    (lambda: girih.Numeric(name="price", transform=3), "transform = 3: expected one of 'log1p', 'standardize'"),
    (lambda: girih.Table(name="user", dtype="fp16"), "dtype = 'fp16': expected one of 'float32', 'bfloat16', 'float16'"),
    (lambda: girih.optim.Adam(lr=-1.0), "adam.lr = -1.0: expected a finite number ≥ 0"),
    (lambda: girih.optim.Adam(betas=0.9), "adam.betas = 0.9: expected a list"),
    (lambda: girih.optim.Adagrad(learning_rate=0.1), "Adagrad: unknown option 'learning_rate'; did you mean 'lr'?"),
    (lambda: girih.optim.Adagrad(weight_decay=0.1), "Adagrad: unknown option 'weight_decay'; did you mean 'l2'?"),
    (lambda: girih.optim.Adagrad(momentum=0.1), "Adagrad: unknown option 'momentum'; valid: eps, initial_acc"),
    (lambda: girih.optim.Adagrad(0.05), "Adagrad(0.05): options need names; write Adagrad(lr=0.05)"),
    (lambda: girih.Categorical("user", 4), "Categorical('user'): options need names; write Categorical(name='user')"),
    (lambda: girih.Categorical(name="user", embedding_dim=4), "Categorical: unknown option 'embedding_dim'; did you mean 'dim'?"),
    (lambda: girih.Table(nane="user"), "Table: unknown option 'nane'; did you mean 'name'?"),
    (lambda: girih.Hybrid(servers=2), "Hybrid: unknown option 'servers'; valid: compress_ids, embedding_servers, "),
    (lambda: girih.Hierarchical(trainers=2), "Hierarchical: unknown option 'trainers'; strategies with it: "),
    (lambda: girih.Synchronous(embedding_servers=3), "unknown option 'embedding_servers'; strategies with it: asynchronous hierarchical hybrid"),
    (lambda: girih.Hybrid(tau=4), "Hybrid: unknown option 'tau'; τ is the option 'staleness'; strategies with it: asynchronous hybrid"),
    (lambda: girih.PublishOptions(every_s=1), "PublishOptions: option 'to' is missing; write PublishOptions(to=..., ...)"),
    (lambda: girih.Table(name="user", optimizer=torch.optim.Adam), "table 'user': optimizer = the class Adam: expected one of girih's own: Adagrad(...), Adam(...), "),
    (lambda: girih.read_csv("none.csv", SCHEMA, sep=";"), "unknown option 'sep'; did you mean 'separator'?"),
    (lambda: girih.read_csv("none.csv", SCHEMA, separatr=";"), "unknown option 'separatr'; did you mean 'separator'?"),
    (lambda: girih.Local(2), "Local(2): options need names; it has no options"),
    (lambda: girih.Local(trainers=2), "Local: unknown option 'trainers'; strategies with it: asynchronous hybrid substitution synch"),
    (lambda: girih.TrainOptions(epochs=-1), "epochs = -1: expected an integer of at least 0"),
    (lambda: girih.TrainOptions(precision="fp16"), "precision = 'fp16': expected one of 'float32', 'bfloat16'"),
    (lambda: girih.EarlyStopping(patience=-1), "patience = -1: expected an integer of at least 0"),
    (lambda: girih.EarlyStopping(patience=1.5), "patience = 1.5: expected an integer of at least 0"),
    (lambda: girih.CheckpointOptions(keep=0), "keep = 0: expected an integer of at least 1"),
    (lambda: girih.CheckpointOptions(every_steps=0.5), "every_steps = 0.5: expected an integer of at least"),
    (lambda: girih.StoreOptions(reserve_rows=10.5), "reserve_rows = 10.5: expected an integer of at least 1"),
    (lambda: girih.TrainOptions(evaluate_every_steps=2.5), "evaluate_every_steps = 2.5: expected an integer of at least 1"),
    (lambda: girih.TrainOptions(max_steps=2.5), "max_steps = 2.5: expected an integer of at least 1"),
    (lambda: girih.TrainOptions(log_every_steps=True), "log_every_steps = True: expected an integer of at"),
    (lambda: girih.TrainOptions(clip_norm="1"), "clip_norm = '1': expected a finite number > 0"),
    (lambda: girih.StoreOptions(shards=0), "shards = 0: expected an integer from 1 to 4096"),
    (lambda: girih.models.DIN(SCHEMA), "din: the schema has no sequence feature"),
]  # fmt: skip

TRAINERS = [
    (lambda: girih.Trainer("deepfm"), "model = 'deepfm': expected a torch.nn.Module, as girih.models.DeepFM(schema)"),
    (lambda: girih.nn.EmbeddingBag(dim=4, mode="max"), "mode = 'max': expected 'sum', 'mean' or 'sqrtn'"),
    (lambda: girih.Trainer(nn.Linear(1, 1), schema="config.toml"), "schema = 'config.toml': expected a girih.Sch"),
    (lambda: trainer(schema=SCHEMA, sparse_optimizer="adam"), "sparse_optimizer = 'adam': expected one of girih.o"),
    (lambda: trainer(sparse_optimizer=torch.optim.SparseAdam), "sparse_optimizer = the class SparseAdam: expected one of girih.optim; give an instance, not a class"),
    (lambda: trainer(sparse_optimizer=torch.optim.SGD([torch.zeros(1)])), "sparse_optimizer = an SGD: expected one of girih.optim"),
    (lambda: trainer(first_order_optimizer="ftrl"), "first_order_optimizer = 'ftrl': expected one of girih.optim"),
    (lambda: trainer(dense_optimizer="adam"), "dense_optimizer = 'adam': expected a function of parameters, as lambd"),
    (lambda: trainer(dense_optimizer=torch.optim.Adam([torch.zeros(1)])), "dense_optimizer = an Adam: expected a fun"),
    (lambda: trainer(dense_optimizer=list), "dense_optimizer made a list; expected a torch.optim.Optimizer"),
    (lambda: trainer(strategy="local"), "strategy = 'local': expected a strategy, as girih.Hybrid() for 'hybrid', or an instance"),
    (lambda: trainer(options={"epochs": 3}), "options = a dict: expected girih.TrainOptions(...)"),
    (lambda: trainer(store=4), "store = 4: expected girih.StoreOptions(...)"),
    (lambda: trainer(checkpoints=4), "checkpoints = 4: expected girih.CheckpointOptions(...)"),
    (lambda: trainer(options=girih.TrainOptions(device="tpu")), "device = 'tpu': expected 'auto', 'cpu' or 'cuda'"),
    (lambda: trainer(options=girih.TrainOptions(gauc_by="usr")), "gauc_by = 'usr': no categorical feature has that"),
    (lambda: trainer(options=girih.TrainOptions(tensorboard=True)), "tensorboard = true needs a run directory; giv"),
    (lambda: girih.Trainer(girih.models.LR(SCHEMA), schema=OTHER), "schema: its schema differs from the model's: features of other kinds, dims, tables or transforms"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"), SCHEMAS + TRAINERS, ids=[message for _, message in SCHEMAS + TRAINERS]
)
def test_descriptions_and_trainers(call, message):
    with pytest.raises(errors.ConfigError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


READERS = [
    ({"batchsize": 32}, errors.ConfigError, "unknown option 'batchsize'; did you mean 'batch_size'?"),
    ({"schema": girih.Schema([USER], "clik")}, errors.DataError, "no column 'clik' (label 'clik'); did you mean"),
    ({"paths": "nothing.parquet"}, errors.MissingFileError, "nothing.parquet: no such file"),
    ({"paths": []}, errors.ConfigError, "paths: the list is empty; expected at least one file or pattern"),
    ({"paths": [3]}, errors.ConfigError, "paths: 3 is not a path; expected strings such as"),
    ({"paths": 3}, errors.ConfigError, "paths: 3 is not a path"),
    ({"schema": "config.toml"}, errors.ConfigError, "schema = 'config.toml': expected a girih.Schema"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), READERS, ids=[message for _, _, message in READERS])
def test_readers(site, change, kind, message):
    options = {"paths": site / "train.parquet", "schema": SCHEMA} | change
    with pytest.raises(kind, match=re.escape(message)) as caught:
        girih.read_parquet(**options)
    assert isinstance(caught.value, errors.UserError)
    assert "\n" not in str(caught.value)


FITS = [
    (lambda t, site: t.fit(site / "train.parquet"), "train = a PosixPath: expected a girih.Dataset, for example from girih.read_parquet(paths, schema)"),
    (lambda t, site: t.fit(pd.read_parquet(site / "train.parquet")), "train = a DataFrame: expected a girih.Dataset, for example from girih.read_arrow(frame, schema)"),
    (lambda t, site: t.predict(pq.read_table(site / "train.parquet")), "data = a Table: expected a girih.Dataset, for example from girih.read_arrow(frame, schema)"),
    (lambda t, site: t.fit([1, 2]), "train = a list: expected a girih.Dataset, for example from girih.read_parquet(paths, schema)"),
    (lambda t, site: t.fit(read(site, OTHER)), "train: its schema differs from the model's: features of other kinds,"),
    (lambda t, site: t.fit(read(site), read(site, OTHER)), "valid: its schema differs from the model's: features of"),
    (lambda t, site: t.fit(read(site, with_labels=False)), "train: read without labels; expected with_labels=True"),
    (lambda t, site: t.fit(read(site), epochs=-1), "epochs = -1: expected an integer of at least 0"),
    (lambda t, site: t.fit(read(site), epochs="2"), "epochs = '2': expected an integer of at least 0"),
    (lambda t, site: t.evaluate(read(site, OTHER)), "data: its schema differs from the model's: features of other"),
    (lambda t, site: t.evaluate(read(site, with_labels=False)), "data: read without labels; expected with_labels="),
    (lambda t, site: t.evaluate(read(site)), "'price' is standardized by the training data: fit or load first"),
    (lambda t, site: t.predict(read(site)), "'price' is standardized by the training data: fit or load first"),
    (lambda t, site: t.predict(read(site, OTHER)), "data: its schema differs from the model's: features of other"),
    (lambda t, site: t.fit(read(site, girih.Schema([girih.Categorical(name="item")], "click"))), "features and labels ['item', 'click'] instead of ['user', 'price', 'click']; make both with one schema"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), FITS, ids=[message for _, message in FITS])
def test_data_that_does_not_go_with_the_trainer(site, call, message):
    with trainer() as made, pytest.raises(errors.ConfigError, match=re.escape(message)) as caught:
        call(made, site)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        girih.TrainOptions(early_stopping=girih.EarlyStopping()),
        girih.TrainOptions(lr_schedule={"name": "ReduceLROnPlateau"}),
        girih.TrainOptions(evaluate_every_steps=3),
    ],
    ids=["early stopping", "plateau", "evaluate"],
)
def test_options_that_need_validation_data(site, options):
    with (
        trainer(options=options) as made,
        pytest.raises(errors.ConfigError, match=r"needs validation data; .*give fit\(train, valid\)"),
    ):
        made.fit(read(site))


def test_checkpoints_that_do_not_fit(site, trained_plot):
    run = trained_plot / "run"
    with trainer() as made:
        with pytest.raises(errors.CheckpointError, match="was trained with features"):
            made.load(run)
        with pytest.raises(errors.MissingFileError, match="no such run or checkpoint directory"):
            made.load(site / "nowhere")
        with pytest.raises(errors.CheckpointError, match="holds no complete checkpoint"):
            made.load(site / "temporary")
    schema = girih.Schema.from_dict(changed(TRAINED))
    for hidden, optimizer, message in (
        (9, girih.optim.Adam(), "fit this model"),
        (8, None, "optimizer is adam with"),
    ):
        model = girih.models.DeepFM(schema, hidden=(hidden,))
        with girih.Trainer(model, sparse_optimizer=optimizer) as made:
            with pytest.raises(errors.CheckpointError, match=message):
                made.load(run)
            assert not made.sparse.stats().store["rows"]


def test_a_run_that_is_a_file(site):
    with pytest.raises(errors.RunDirectoryError, match="is a file; expected a directory"):
        trainer(run=site / "clicks.csv")


class Wrong(nn.Module):
    """Returns what a function makes of the numeric features."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, numeric, embeddings):
        return self.answer(numeric)


WRONG = [
    (lambda x: x[:, 0], errors.ConfigError, "Wrong.forward returned logits of shape [32]; expected [32, 1]"),
    (lambda x: x.repeat(1, 3), errors.ConfigError, "returned logits of shape [32, 3]; expected [32, 1]"),
    (lambda x: [x], errors.ConfigError, "Wrong.forward returned a list; expected logits"),
    (lambda x: x.nothing, errors.ConfigError, "Wrong.forward failed: AttributeError: "),
    (lambda x: x * float("nan"), errors.NonFiniteError, "step 1: the loss is nan; none of its updates were applied"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "kind", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_models_that_answer_wrongly(site, answer, kind, message):
    data = read(site, batch_size=32)
    with girih.Trainer(Wrong(answer), schema=SCHEMA) as made, pytest.raises(kind, match=re.escape(message)):
        made.fit(data)


def test_a_model_that_fails_only_when_it_is_evaluated(site):
    class Late(Wrong):
        def forward(self, numeric, embeddings):
            return embeddings["user"][:, :1] * (1.0 if self.training else float("inf"))

    data = read(site, batch_size=32)
    with girih.Trainer(Late(None), schema=SCHEMA) as made:
        made.fit(data)
        with pytest.raises(errors.NonFiniteError, match="inf"):
            made.evaluate(data)

"""A config with a name that nobody knows, something of the wrong type, or something missing."""

import pytest

UNKNOWN = [
    ("trian.epochs = 2", "unknown section [trian]; did you mean 'train'?"),
    ("data.batchsize = 32", "[data]: unknown key 'batchsize'; did you mean 'batch_size'?"),
    ("features.0.dims = 4", "[[features]] 'user': unknown key 'dims'; did you mean 'dim'?"),
    (
        "features.4.dim = 4",
        "[[features]] 'price': unknown key 'dim'; valid: column, kind, name, time_unit, transform",
    ),
    ("features.3.bucketize = [1.0]", "[[features]] 'history': unknown key 'bucketize'; valid: column, dim"),
    (
        "tables = [{name = 'user', initialiser = 'zeros'}]",
        "[[tables]] 'user': unknown key 'initialiser'; did",
    ),
    ("labels.name = 'click'", "[labels]: unknown key 'name'; did you mean 'names'?"),
    ("model = {name = 'dnn', hiden = [8]}", "[model] dnn: unknown option 'hiden'; did you mean 'hidden'?"),
    ("model.hidden = [8]", "[model] lr: unknown option 'hidden'; nothing is valid here"),
    ("model = {name = 'fm', dropout = 0.1}", "[model] fm: unknown option 'dropout'; nothing is valid here"),
    (
        "model = {name = 'deepfm', num_experts = 2}",
        "[model] deepfm: unknown option 'num_experts'; valid: batch",
    ),
    (
        "sparse_optimizer = {name = 'adagrad', learning_rate = 0.1}",
        "[sparse_optimizer]: unknown key 'learning",
    ),
    ("sparse_optimizer = {name = 'adagrad', momentum = 0.9}", "unknown key 'momentum'; valid: eps, initial"),
    (
        "first_order_optimizer = {name = 'ftrl', lambda1 = 0.1}",
        "[first_order_optimizer]: unknown key 'lambda1'",
    ),
    (
        "dense_optimizer = {name = 'adam', learning_rate = 0.9}",
        "[dense_optimizer]: unknown option 'learning_rate'; did you mean 'lr'?",
    ),
    (
        "dense_optimizer = {name = 'adam', momentum = 0.9}",
        "[dense_optimizer]: unknown option 'momentum'; valid:",
    ),
    ("checkpoint.every_step = 5", "[checkpoint]: unknown key 'every_step'; did you mean 'every_steps'?"),
    ("train.epoch = 5", "[train]: unknown key 'epoch'; did you mean 'epochs'?"),
    (
        "strategy = {name = 'hierarchical', trainers = 2}",
        "[strategy]: unknown key 'trainers'; set groups, each of them one trainer; or groups, trainers_per_group and",
    ),
    ("strategy = {name = 'local', staleness = 4}", "[strategy]: unknown key 'staleness'; valid: name"),
    ("store.shard = 4", "[store]: unknown key 'shard'; did you mean 'shards'?"),
    ("train.early_stopping = {patiense = 4}", "[train] early_stopping: unknown key 'patiense'; did you mean"),
    (
        "train.lr_schedule = {name = 'StepLR', step_sizes = 4}",
        "lr_schedule: unknown option 'step_sizes'; did",
    ),
    (
        "tables = [{name = 'user', eviction = {name = 'lru', max_row = 4}}]",
        "eviction: unknown key 'max_row'; did",
    ),
    (
        "tables = [{name = 'user', admission = {name = 'min_count', cuont = 4}}]",
        "admission: unknown key 'cuont'",
    ),
    (
        "tables = [{name = 'user', initializer = {name = 'normal', sdt = 4}}]",
        "initializer: unknown key 'sdt'",
    ),
    ("strategy.name = 'hybird'", "[strategy]: unknown name 'hybird'; did you mean 'hybrid'?"),
    ("model.name = 'deepmf'", "[model].name = 'deepmf': unknown model; did you mean 'deepfm'?"),
    (
        "sparse_optimizer.name = 'adagard'",
        "[sparse_optimizer]: unknown name 'adagard'; did you mean 'adagrad'?",
    ),
    ("first_order_optimizer.name = 'ftlr'", "unknown name 'ftlr'; did you mean 'ftrl'?"),
    ("dense_optimizer.name = 'adma'", "[dense_optimizer]: unknown name 'adma'; did you mean 'adam'?"),
    ("train.lr_schedule.name = 'StepLr'", "lr_schedule: unknown name 'StepLr'; did you mean 'StepLR'?"),
    (
        "data.format = 'parqet'",
        "[data] format = 'parqet': expected one of 'parquet', 'csv', 'criteo', 'libsvm'",
    ),
    (
        "features.0.kind = 'categorial'",
        "[[features]] 'user': unknown kind 'categorial'; did you mean 'categor",
    ),
    (
        "features.0.pooling = 'max'",
        "[[features]] 'user' pooling = 'max': expected one of 'sum', 'mean', 'sqrt",
    ),
    ("features.4.transform = 'sqrt'", "[[features]] 'price' transform = 'sqrt': expected one of 'log1p'"),
    (
        "tables = [{name = 'user', initializer = 'norml'}]",
        "[[tables]] 'user' initializer: unknown name 'norml'",
    ),
    ("tables = [{name = 'user', eviction = 'lur'}]", "eviction: unknown name 'lur'; did you mean 'lru'?"),
    (
        "tables = [{name = 'user', admission = 'mincount'}]",
        "unknown name 'mincount'; did you mean 'min_count'?",
    ),
    ("tables = [{name = 'user', dtype = 'fp16'}]", "dtype = 'fp16': expected one of 'float32', 'bfloat16'"),
    ("store.arena = 'ssd'", "[store] arena = 'ssd': expected one of 'heap', 'file'"),
    ("train.precision = 'fp16'", "[train] precision = 'fp16': expected one of 'float32', 'bfloat16'"),
    ("train.on_nonfinite = 'ignore'", "[train] on_nonfinite = 'ignore': expected one of 'stop', 'skip'"),
    ("data.on_bad_row = 'ignore'", "[data] on_bad_row = 'ignore': expected one of 'error', 'skip'"),
    (
        "train.early_stopping.metric = 'aucc'",
        "early_stopping: metric = 'aucc': expected one of auc, auprc, gauc, uauc",
    ),
    (
        "train.lr_schedule = {name = 'ReduceLROnPlateau', metric = 'aucc'}",
        "lr_schedule: metric = 'aucc': expect",
    ),
    (
        "train.lr_schedule = {name = 'StepLR', interval = 'batch'}",
        "interval = 'batch': expected one of 'epoch', 'step'",
    ),
    ("train.device = 'tpu'", "device = 'tpu': expected 'auto', 'cpu' or 'cuda'"),
    ("train.device = 'meta'", "device = 'meta': expected 'auto', 'cpu' or 'cuda'"),
    ("train.gauc_by = 'usr'", "gauc_by = 'usr': no categorical feature of that name; did you mean 'user'?"),
    (
        "train.gauc_by = 'price'",
        "gauc_by = 'price': no categorical feature of that name; valid: item, tags, us",
    ),
]

WRONG_TYPES = [
    ("train.epochs = 'two'", "[train] epochs = 'two': expected an integer"),
    ("train.epochs = 1.5", "[train] epochs = 1.5: expected an integer"),
    ("train.epochs = true", "[train] epochs = True: expected an integer"),
    ("train.seed = 1.0", "[train] seed = 1.0: expected an integer"),
    ("data.batch_size = '32'", "[data] batch_size = '32': expected an integer"),
    ("data.shuffle = 1", "[data] shuffle = 1: expected true or false"),
    ("data.train = 5", "[data] train = 5: expected a string"),
    ("data.train = [5]", "[data] train = [5]: expected a string"),
    ("data.train = []", "[data]: train = (): expected a path, or a list of paths"),
    ("data.train = ''", "[data]: train = '': expected a path, or a list of paths"),
    ("data.valid = []", "[data]: valid = (): expected a path, or a list of paths"),
    ("data = 'train.parquet'", "[data] = 'train.parquet': expected a table of options"),
    ("features = []", "features: the list is empty; expected at least one feature"),
    ("features = 'user'", "features: expected [[features]], a list of tables"),
    (
        "features = ['user']",
        "[[features]] number 1: unknown kind 'user'; valid: categorical, numeric, sequence",
    ),
    ("features = [3]", "[[features]] number 1 = 3: expected a table with the key 'kind'"),
    ("tables = {user = {dim = 4}}", "tables: expected [[tables]], a list of tables"),
    ("features.0.dim = '4'", "[[features]] 'user' dim = '4': expected an integer"),
    ("features.0.dim = 4.5", "[[features]] 'user' dim = 4.5: expected an integer"),
    ("features.0.dim = true", "[[features]] 'user' dim = True: expected an integer"),
    ("features.0.bucketize = '1,2'", "[[features]] 'user' bucketize = '1,2': expected a list"),
    ("features.0.name = 5", "name = 5: expected a string"),
    ("features.0.name = ''", "name = '': expected a non-empty string"),
    ("labels = ['click']", "[labels] = ['click']: expected a table of options"),
    ("labels.names = 5", "[labels] names = 5: expected a list"),
    ("labels.names = []", "labels: names is empty; expected at least one label"),
    ("labels.derive = 'rating > 3'", "[labels] derive = 'rating > 3': expected a table of keys and values"),
    ("labels.derive.click = 3", "[labels] derive.click = 3: expected a string"),
    ("model = 'lr'", "section [model] needs a name; valid: atbrg, can, dcn, dcnv2, "),
    ("model.name = 5", "[model].name = 5: unknown model; valid: atbrg, can, dcn, dcnv2, "),
    ("model = {name = 'dnn', hidden = 400}", "hidden = 400: expected a list"),
    ("model = {name = 'dnn', hidden = ['400']}", "hidden[0] = '400': expected an integer"),
    ("model = {name = 'dnn', batch_norm = 1}", "batch_norm = 1: expected true or false"),
    ("train = 'fast'", "[train] = 'fast': expected a table of options"),
    ("train.early_stopping = true", "[train] early_stopping = True: expected a table of options"),
    ("train.lr_schedule = 'StepLR'", "[train] lr_schedule = 'StepLR': expected a table of keys and values"),
    (
        "train.lr_schedule = {name = 'StepLR', step_size = '3'}",
        "lr_schedule.step_size = '3': expected an integer",
    ),
    (
        "train.lr_schedule = {name = 'MultiStepLR', milestones = 5}",
        "torch refuses these options: 'int' object is",
    ),
    ("dense_optimizer = 'adem'", "[dense_optimizer]: unknown name 'adem'; did you mean 'adam'?"),
    (
        "dense_optimizer = ['adam']",
        "[dense_optimizer] = ['adam']: expected a table of options, as in { name =",
    ),
    ("dense_optimizer.lr = 'fast'", "[dense_optimizer].lr = 'fast': expected a number"),
    ("dense_optimizer.betas = [0.9]", "[dense_optimizer].betas = [0.9]: expected a list of 2"),
    ("sparse_optimizer = 3", "[sparse_optimizer] = 3: expected a table with the key 'name'"),
    (
        "sparse_optimizer = {name = 'sgd', lr = 'fast'}",
        "[sparse_optimizer] lr = 'fast': expected a finite number ≥ 0",
    ),
    ("strategy = 3", "[strategy] = 3: expected a table of options"),
    ("strategy.name = 3", "[strategy]: unknown name 3; valid: "),
    ("store = 3", "[store] = 3: expected a table of options"),
    ("checkpoint.keep = true", "[checkpoint] keep = True: expected an integer"),
]

MISSING = [
    ("data = 'GONE'", "section [data] is missing"),
    ("data.train = 'GONE'", "[data]: key 'train' is missing"),
    ("labels = 'GONE'", "section [labels] is missing"),
    ("labels.names = 'GONE'", "[labels]: key 'names' is missing"),
    ("features = 'GONE'", "section [[features]] is missing"),
    (
        "features.0.kind = 'GONE'",
        "[[features]] 'user': key 'kind' is missing; one of categorical, numeric, seq",
    ),
    ("features.0.name = 'GONE'", "[[features]] number 1: key 'name' is missing"),
    ("tables = [{dim = 4}]", "[[tables]] number 1: key 'name' is missing"),
    ("model = 'GONE'", "section [model] needs a name; valid: atbrg, can, dcn, dcnv2, "),
    ("model.name = 'GONE'", "section [model] needs a name; valid: atbrg, can, dcn, dcnv2, "),
    (
        "first_order_optimizer.lr = 0.1",
        "[first_order_optimizer]: key 'name' is missing; one of adagrad, adam, ftrl, ",
    ),
    ("tables = [{name = 'user', eviction = 'lru'}]", "[[tables]] 'user' eviction: key 'max_rows' is missing"),
    (
        "tables = [{name = 'user', admission = {}}]",
        "admission: key 'name' is missing; one of min_count, probab",
    ),
    ("train.lr_schedule = {step_size = 3}", "lr_schedule: key 'name' is missing, as in name = \"StepLR\""),
    ("train.lr_schedule = {name = 'StepLR'}", "lr_schedule: option 'step_size' is missing"),
]


@pytest.mark.parametrize(("change", "told"), UNKNOWN, ids=[change for change, _ in UNKNOWN])
def test_a_name_that_nobody_knows(site, change, told):
    site.configure(change)
    line = site.told(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert told in line


@pytest.mark.parametrize(("change", "told"), WRONG_TYPES, ids=[change for change, _ in WRONG_TYPES])
def test_a_value_of_the_wrong_type(site, change, told):
    site.configure(change)
    line = site.told(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert told in line


@pytest.mark.parametrize(("change", "told"), MISSING, ids=[change for change, _ in MISSING])
def test_something_missing(site, change, told):
    site.configure(change)
    line = site.told(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert told in line


def test_the_config_that_the_others_differ_from_is_good(site):
    assert "AUC" in site.girih(*site.train())
    assert (site / "run" / "summary.json").is_file()

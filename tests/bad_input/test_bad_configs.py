"""A config with unknown names, wrong types, missing keys, values out of range, or values that do not go together."""

import pytest
import torch

UNKNOWN = [
    ("trian.epochs = 2", "unknown section [trian]; did you mean 'train'?"),
    ("data.batchsize = 32", "[data]: unknown key 'batchsize'; did you mean 'batch_size'?"),
    ("features.0.dims = 4", "[[features]] 'user': unknown key 'dims'; did you mean 'dim'?"),
    ("features.4.dim = 4", "[[features]] 'price': unknown key 'dim'; valid: column, kind, name, time_unit, transform"),
    ("features.3.bucketize = [1.0]", "[[features]] 'history': unknown key 'bucketize'; valid: column, dim"),
    ("tables = [{name = 'user', initialiser = 'zeros'}]", "[[tables]] 'user': unknown key 'initialiser'; did"),
    ("labels.name = 'click'", "[labels]: unknown key 'name'; did you mean 'names'?"),
    ("model = {name = 'fm', dropout = 0.1}", "[model] fm: unknown option 'dropout'; there are none"),
    ("model = {name = 'deepfm', num_experts = 2}", "[model] deepfm: unknown option 'num_experts'; valid: batch"),
    ("sparse_optimizer = {name = 'adagrad', learning_rate = 0.1}", "[sparse_optimizer]: unknown key 'learning"),
    ("sparse_optimizer = {name = 'adagrad', momentum = 0.9}", "unknown key 'momentum'; valid: eps, initial"),
    ("first_order_optimizer = {name = 'ftrl', lambda1 = 0.1}", "[first_order_optimizer]: unknown key 'lambda1'"),
    ("dense_optimizer = {name = 'adam', learning_rate = 0.9}", "[dense_optimizer]: unknown option 'learning_rate'; did you mean 'lr'?"),
    ("dense_optimizer = {name = 'adam', momentum = 0.9}", "[dense_optimizer]: unknown option 'momentum'; valid:"),
    ("checkpoint.every_step = 5", "[checkpoint]: unknown key 'every_step'; did you mean 'every_steps'?"),
    ("strategy = {name = 'hierarchical', trainers = 2}", "[strategy]: unknown key 'trainers'; strategies with it: asynchronous hybrid substitution synchronous; hierarchical: set groups, trainers_per_group and"),
    ("strategy = {name = 'local', staleness = 4}", "[strategy]: unknown key 'staleness'; strategies with it: asynchronous hybrid"),
    ("store.shard = 4", "[store]: unknown key 'shard'; did you mean 'shards'?"),
    ("train.early_stopping = {patiense = 4}", "[train] early_stopping: unknown key 'patiense'; did you mean"),
    ("train.lr_schedule = {name = 'StepLR', step_sizes = 4}", "lr_schedule: unknown option 'step_sizes'; did"),
    ("tables = [{name = 'user', eviction = {name = 'lru', max_row = 4}}]", "eviction: unknown key 'max_row'; did"),
    ("tables = [{name = 'user', admission = {name = 'min_count', cuont = 4}}]", "admission: unknown key 'cuont'"),
    ("tables = [{name = 'user', initializer = {name = 'normal', sdt = 4}}]", "initializer: unknown key 'sdt'"),
    ("strategy.name = 'hybird'", "[strategy]: unknown name 'hybird'; did you mean 'hybrid'?"),
    ("model.name = 'deepmf'", "[model].name = 'deepmf': unknown model; did you mean 'deepfm'?"),
    ("sparse_optimizer.name = 'adagard'", "[sparse_optimizer]: unknown name 'adagard'; did you mean 'adagrad'?"),
    ("first_order_optimizer.name = 'ftlr'", "unknown name 'ftlr'; did you mean 'ftrl'?"),
    ("dense_optimizer.name = 'adma'", "[dense_optimizer]: unknown name 'adma'; did you mean 'adam'?"),
    ("train.lr_schedule.name = 'StepLr'", "lr_schedule: unknown name 'StepLr'; did you mean 'StepLR'?"),
    ("features.0.kind = 'categorial'", "[[features]] 'user': unknown kind 'categorial'; did you mean 'categor"),
    ("features.0.pooling = 'max'", "[[features]] 'user' pooling = 'max': expected one of 'sum', 'mean', 'sqrt"),
    ("features.4.transform = 'sqrt'", "[[features]] 'price' transform = 'sqrt': expected one of 'log1p'"),
    ("tables = [{name = 'user', initializer = 'norml'}]", "[[tables]] 'user' initializer: unknown name 'norml'"),
    ("tables = [{name = 'user', eviction = 'lur'}]", "eviction: unknown name 'lur'; did you mean 'lru'?"),
    ("tables = [{name = 'user', admission = 'mincount'}]", "unknown name 'mincount'; did you mean 'min_count'?"),
    ("tables = [{name = 'user', dtype = 'fp16'}]", "dtype = 'fp16': expected one of 'float32', 'bfloat16'"),
    ("store.arena = 'ssd'", "[store] arena = 'ssd': expected one of 'heap', 'file'"),
    ("train.precision = 'fp16'", "[train] precision = 'fp16': expected one of 'float32', 'bfloat16'"),
    ("train.on_nonfinite = 'ignore'", "[train] on_nonfinite = 'ignore': expected one of 'stop', 'skip'"),
    ("train.early_stopping.metric = 'aucc'", "early_stopping: metric = 'aucc': expected one of auc, auprc, gauc, uauc"),
    ("train.lr_schedule = {name = 'ReduceLROnPlateau', metric = 'aucc'}", "lr_schedule: metric = 'aucc': expect"),
    ("train.lr_schedule = {name = 'StepLR', interval = 'batch'}", "interval = 'batch': expected one of 'epoch', 'step'"),
    ("train.device = 'tpu'", "device = 'tpu': expected 'auto', 'cpu' or 'cuda'"),
    ("train.device = 'meta'", "device = 'meta': expected 'auto', 'cpu' or 'cuda'"),
    ("train.gauc_by = 'usr'", "gauc_by = 'usr': no categorical feature has that name; did you mean 'user'?"),
    ("train.gauc_by = 'price'", "gauc_by = 'price': no categorical feature has that name; valid: item, tags, us"),
]  # fmt: skip

WRONG_TYPES = [
    ("train.epochs = 1.5", "[train] epochs = 1.5: expected an integer"),
    ("train.epochs = true", "[train] epochs = True: expected an integer"),
    ("train.seed = 1.0", "[train] seed = 1.0: expected an integer"),
    ("data.shuffle = 1", "[data] shuffle = 1: expected true or false"),
    ("data.train = [5]", "[data] train = [5]: expected a string"),
    ("data.valid = []", "[data]: valid = (): expected a path, or a list of paths"),
    ("data = 'train.parquet'", "[data] = 'train.parquet': expected a table of options"),
    ("features = []", "features: the list is empty; expected at least one feature"),
    ("features = 'user'", "features: expected [[features]], a list of tables"),
    ("features = ['user']", "[[features]] number 1: unknown kind 'user'; valid: categorical, numeric, sequence"),
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
    ("train = 'fast'", "[train] = 'fast': expected a table of options"),
    ("train.early_stopping = true", "[train] early_stopping = True: expected a table of options"),
    ("train.lr_schedule = 'StepLR'", "[train] lr_schedule = 'StepLR': expected a table of keys and values"),
    ("train.lr_schedule = {name = 'StepLR', step_size = '3'}", "lr_schedule.step_size = '3': expected an integer"),
    ("train.lr_schedule = {name = 'MultiStepLR', milestones = 5}", "torch refuses these options: 'int' object is"),
    ("dense_optimizer = 'adem'", "[dense_optimizer]: unknown name 'adem'; did you mean 'adam'?"),
    ("dense_optimizer = ['adam']", "[dense_optimizer] = ['adam']: expected a table of options, as in { name ="),
    ("dense_optimizer.lr = 'fast'", "[dense_optimizer].lr = 'fast': expected a number"),
    ("dense_optimizer.betas = [0.9]", "[dense_optimizer].betas = [0.9]: expected a list of 2"),
    ("sparse_optimizer = 3", "[sparse_optimizer] = 3: expected a table with the key 'name'"),
    ("strategy = 3", "[strategy] = 3: expected a table of options"),
    ("strategy.name = 3", "[strategy]: unknown name 3; valid: "),
    ("store = 3", "[store] = 3: expected a table of options"),
    ("checkpoint.keep = true", "[checkpoint] keep = True: expected an integer"),
]  # fmt: skip

MISSING = [
    ("data = 'GONE'", "section [data] is missing"),
    ("labels = 'GONE'", "section [labels] is missing"),
    ("labels.names = 'GONE'", "[labels]: key 'names' is missing"),
    ("features = 'GONE'", "section [[features]] is missing"),
    ("features.0.kind = 'GONE'", "[[features]] 'user': key 'kind' is missing; one of categorical, numeric, seq"),
    ("features.0.name = 'GONE'", "[[features]] number 1: key 'name' is missing"),
    ("tables = [{dim = 4}]", "[[tables]] number 1: key 'name' is missing"),
    ("model = 'GONE'", "section [model] needs a name; valid: atbrg, can, dcn, dcnv2, "),
    ("model.name = 'GONE'", "section [model] needs a name; valid: atbrg, can, dcn, dcnv2, "),
    ("first_order_optimizer.lr = 0.1", "[first_order_optimizer]: key 'name' is missing; one of adagrad, adam, ftrl, "),
    ("tables = [{name = 'user', eviction = 'lru'}]", "[[tables]] 'user' eviction: key 'max_rows' is missing"),
    ("tables = [{name = 'user', admission = {}}]", "admission: key 'name' is missing; one of min_count, probab"),
    ("train.lr_schedule = {step_size = 3}", "lr_schedule: key 'name' is missing, for example name = \"StepLR\""),
    ("train.lr_schedule = {name = 'StepLR'}", "lr_schedule: option 'step_size' is missing"),
]  # fmt: skip

OUT_OF_RANGE = [
    ("labels.missing = 'drop'", "[labels] missing = 'drop': expected one of 'error', 'skip'"),
    ("labels.loss = {click = 'mae'}", "loss.click = 'mae': expected one of 'bce', 'mse', 'huber'"),
    ("labels.huber_delta = 0.0", "[labels] huber_delta = 0.0: expected a finite number > 0"),
    ("labels.mask = {clikc = 'rating'}", "labels: mask has 'clikc', which is not among names = ['click']"),
    ("train.early_stopping.metric = 'rmse'", "train: early_stopping: metric = 'rmse': the loss of the first label, 'click', is bce; expected auc or logloss"),
    ("train.epochs = -1", "[train] epochs = -1: expected an integer of at least 0"),
    ("train.max_steps = 0", "max_steps = 0: expected an integer of at least 1"),
    ("train.seed = -1", "[train] seed = -1: expected an integer from 0 to 2⁶³ - 1"),
    ("train.seed = 9223372036854775808", "seed = 9223372036854775808: expected an integer from 0 to 2⁶³ - 1"),
    ("train.clip_norm = 0.0", "clip_norm = 0.0: expected a finite number > 0"),
    ("train.clip_norm = nan", "clip_norm = nan: expected a finite number > 0"),
    ("train.evaluate_every_steps = -5", "evaluate_every_steps = -5: expected an integer of at least 1"),
    ("train.log_every_steps = 0", "log_every_steps = 0: expected an integer of at least 1"),
    ("train.early_stopping.metric = 'recall@5'", "early_stopping: metric = 'recall@5': expected one of auc, auprc, gauc, uauc, logloss, normalized_entropy, mae, rmse; rank_at" " lists the ks to compute, and gauc_by names the feature that groups examples"),
    ("train.early_stopping.patience = -1", "[train] early_stopping patience = -1: expected"),
    ("train.early_stopping.min_delta = nan", "min_delta = nan: expected a finite number ≥ 0"),
    (f"data.batch_size = {1 << 70}", "expected an integer from 1 to 2147483647"),
    ("data.where = 'price >'", "[data]: where = 'price >': cannot be read; expected a condition"),
    ("data.where = 'price'", "[data]: where = 'price': 'price' is not a comparison; expected a condition such as"),
    ("data.split = {by = 'x', test = 1.5}", "[data] split test = 1.5: expected a finite number ≥ 0 and < 1"),
    ("data.split = {by = 'x'}", "split: valid = 0, test = 0: expected shares of the rows, together above 0 and below"),
    ("features.0.transform = 'minute'", "[[features]] 'user' transform = 'minute': expected one of 'hour', 'weekday'"),
    ("features.0.dim = 0", "[[features]] 'user' dim = 0: expected an integer from 1 to 4096"),
    ("features.0.dim = 100000", "[[features]] 'user' dim = 100000: expected an integer from 1 to 4096"),
    ("features.2.max_length = 0", "[[features]] 'tags' max_length = 0: expected an integer of at least 1"),
    ("features.2.separator = ''", "feature 'tags': separator is empty; leave it out for columns that are lists"),
    ("features.0.bucketize = [2.0, 1.0]", "bucketize = [2.0, 1.0]: expected rising, finite boundaries"),
    ("features.0.bucketize = []", "bucketize = []: expected rising, finite boundaries"),
    ("features.0.bucketize = [1.0, nan]", "bucketize = [1.0, nan]: expected rising, finite boundaries"),
    ("features.4.transform = ['standardize', 'log1p']", "'price': standardize must be the last transform"),
    ("model = {name = 'dnn', hidden = [1000000000000]}", "dnn with these options is larger than memory; lower its"),
    ("model = {name = 'dnn', dropout = nan}", "[model]: dropout = nan: expected a finite number ≥ 0 and < 1"),
    ("sparse_optimizer = {name = 'adagrad', lr = nan}", "[sparse_optimizer] lr = nan: expected a finite number ≥ 0"),
    ("sparse_optimizer = {name = 'adagrad', lr = -0.1}", "[sparse_optimizer] lr = -0.1: expected a finite number ≥ 0"),
    ("sparse_optimizer = {name = 'adagrad', l2 = -0.1}", "[sparse_optimizer] l2 = -0.1: expected a finite number ≥ 0"),
    ("sparse_optimizer = {name = 'adam', betas = [0.9, 1.0]}", "[sparse_optimizer] betas[1] = 1.0: expected a finite number ≥ 0 and < 1"),
    ("sparse_optimizer = {name = 'sgd', momentum = 1.0}", "[sparse_optimizer] momentum = 1.0: expected a finite number ≥ 0 and"),
    ("first_order_optimizer = {name = 'ftrl', lr = 0.0}", "[first_order_optimizer] lr = 0.0: expected a finite number > 0"),
    ("dense_optimizer.lr = nan", "[dense_optimizer].lr = nan: expected a finite number"),
    ("dense_optimizer.lr = inf", "[dense_optimizer].lr = inf: expected a finite number"),
    ("dense_optimizer.lr = -1.0", "torch.optim.Adam refuses these options: Invalid learning rate: -1.0"),
    ("dense_optimizer.betas = [2.0, 0.9]", "torch.optim.Adam refuses these options: Invalid beta parameter"),
    ("dense_optimizer.capturable = true", "[dense_optimizer].capturable: serves steps that torch records or d"),
    ("dense_optimizer = {name = 'sgd', nesterov = true}", "torch.optim.SGD refuses these options: Nesterov mom"),
    ("checkpoint.keep = 0", "[checkpoint] keep = 0: expected an integer of at least 1"),
    ("checkpoint.every_steps = 0", "[checkpoint] every_steps = 0: expected an integer of at least 1"),
    ("store.shards = 0", "[store] shards = 0: expected an integer from 1 to 4096"),
    ("store.shards = 5000", "[store] shards = 5000: expected an integer from 1 to 4096"),
    ("store.reserve_rows = -1", "[store] reserve_rows = -1: expected an integer of at least 1"),
    ("store.reserve_rows = 99999999999", "reserve_rows = 99999999999: expected 1 to 1,610,612,736"),
    ("tables = [{name = 'user', initializer = {name = 'normal', std = -1.0}}]", "std = -1.0: expected a finite number ≥ 0"),
    ("tables = [{name = 'user', initializer = {name = 'constant', value = nan}}]", "value = nan: expected a finite"),
    ("tables = [{name = 'user', initializer = {name = 'uniform', low = 1.0}}]", "low = 1.0 is above high = 0.01"),
    ("tables = [{name = 'user', eviction = {name = 'lru', max_rows = 0}}]", "[[tables]] 'user' eviction max_rows = 0: expected an integ"),
    ("tables = [{name = 'user', eviction = {name = 'ttl', steps = -1}}]", "steps = -1: expected an integer"),
    ("tables = [{name = 'user', eviction = {name = 'lfu', max_rows = 9223372036854775808}}]", "max_rows = 9223372036854775808: expected an integer from 1 to 2⁶² - 1"),
    ("tables = [{name = 'user', admission = {name = 'min_count', count = 300}}]", "count = 300: expected an integ"),
    ("tables = [{name = 'user', admission = {name = 'min_count', cells = 3}}]", "cells = 3: expected an integer"),
    ("tables = [{name = 'user', admission = {name = 'probability', p = 1.5}}]", "p = 1.5: expected a finite number > 0 and ≤ 1"),
    ("train.lr_schedule = {name = 'StepLR', step_size = 0}", "torch refuses these options: ZeroDivisionError"),
    ("train.lr_schedule = {name = 'CosineAnnealingLR', T_max = 0}", "torch refuses these options: ZeroDivision"),
    ("train.lr_schedule = {name = 'OneCycleLR', max_lr = 0.1}", "You must define either total_steps OR"),
    ("train.lr_schedule = {name = 'ExponentialLR', gamma = -1.0}", "the learning rate becomes -0.001; expected a"),
    ("train.lr_schedule = {name = 'ExponentialLR', gamma = nan}", "the learning rate becomes nan; expected a num"),
    ("train.lr_schedule = {name = 'ReduceLROnPlateau', factor = 2.0}", "torch refuses these options: Factor sho"),
    ("train.lr_schedule = {name = 'StepLR', step_size = 2, last_epoch = 4}", "'last_epoch' is not needed, because --resume"),
]  # fmt: skip

AT_ODDS = [
    ("features.new = {name = 'user', kind = 'numeric'}", "feature 'user' is listed 2 times; names must differ"),
    ("labels.names = ['click', 'click']", "label 'click' is listed 2 times; names must differ"),
    ("tables = [{name = 'user'}, {name = 'user'}]", "table 'user' is listed 2 times; names must differ"),
    ("tables = [{name = 'usre'}]", "table 'usre' is used by no feature; did you mean 'user'?"),
    ("tables = [{name = 'history'}]", "table 'history' is used by no feature; valid: item, tags, user"),
    ("tables = [{name = 'user', dim = 8}]", "table 'user' has dim 8, feature 'user' has dim 4"),
    ("features.3.dim = 8", "table 'item' has dim 4, feature 'history' has dim 8"),
    ("features.0.name = 'click'", "feature 'click' reads the label 'click': the model would see the answer"),
    ("features.0 = {bucketize = [1.0], weights = 'w'}", "bucketize makes one id from one number; drop separator"),
    ("labels.derive.clik = 'rating > 3'", "derive has 'clik', which is not among names = ['click']"),
    ("labels.derive.click = 'rating'", "'rating' is not a comparison; expected a column, one of == != < <= > >= in"),
    ("labels.derive.click = 'rating ~ 3'", "derive 'click' = 'rating ~ 3': expected a column, one of == != <"),
    ("labels.derive.click = 'rating > high'", "and 'high': expected a column on one side and a value on the other"),
    ("labels.derive.click = 'rating in 3'", "'3' is not a list of values, as 'in' needs; expected a column, one of"),
    ("labels.names = ['click', 'rating']", "lr: 2 labels ['click', 'rating'], the model has one output; keep one"),
    ("model.name = 'fm'\nfeatures.0.dim = 8", "features must have one dim, received 4 (as 'item'), 8 (as 'user')"),
    ("model.name = 'din'\nfeatures.3.kind = 'categorical'", "din: the schema has no sequence feature; set kind ="),
    ("model.name = 'din'\nfeatures.3.table = 'history'", "sequence 'history' shares its table 'history' with no other feature; expected one categorical feature, its target: if this is 'item', use --set features.history.table=item, or name"),
    ("train.early_stopping.metric = 'gauc'", "early_stopping: metric = 'gauc' needs gauc_by, the feature that"),
    ("train.lr_schedule = {name = 'ReduceLROnPlateau', metric = 'gauc'}", "lr_schedule: metric = 'gauc' needs gau"),
    ("train.lr_schedule = {name = 'ReduceLROnPlateau', mode = 'min'}", "but auc is better when maximal"),
    ("train.lr_schedule = {name = 'ReduceLROnPlateau', interval = 'step'}", "unknown option 'interval'; valid: co"),
    ("store.arena = 'file'", "arena = 'file' and directory belong together; give both or neither"),
    ("store.directory = 'rows'", "arena = 'file' and directory belong together; give both or neither"),
    ("store = {arena = 'file', directory = 'clicks.csv'}", "cannot be used (File exists); name another"),
    ("store.tiers = ['ssd']", "expected ['gpu'], ['dram'], ['dram', 'ssd'], ['gpu', 'dram'] or"),
    ("store = {tiers = ['dram', 'gpu'], hot_rows = 9}", "or ['gpu', 'dram', 'ssd'], hot to cold"),
    ("store.tiers = ['gpu', 'dram']", "hot_rows is missing: how many rows of all tables stay in memory"),
    ("store = {tiers = ['gpu', 'dram'], hot_rows = 9, shards = 2}", "takes neither arena nor several shards; drop them, or use ['dram']"),
    ("store = {tiers = ['gpu', 'dram'], hot_rows = [9, 9]}", "hot_rows = [9, 9]: expected a number"),
    ("store = {tiers = ['gpu', 'dram', 'ssd'], hot_rows = 9}", "hot_rows = 9: expected a list of two numbers, of rows in GPU memory and in memory"),
    ("store.tiers = ['dram', 'ssd']", "hot_rows is missing: how many rows of all tables stay in memory"),
    ("store = {tiers = ['dram', 'ssd'], hot_rows = 9, arena = 'shared'}", "needs arena = 'heap', not 'shared'"),
    ("store = {tiers = ['dram', 'ssd'], hot_rows = 9, ssd_dir = 'clicks.csv'}", "no file can be made there (File exists)"),
    ("data = {format = 'csv', columns = ['a', 'a']}", "columns = ('a', 'a'): expected a list of different names"),
    ("data = {format = 'csv', quote = '||'}", "quote = '||': expected one ASCII character other than the separator, or ''"),
    ("data.format = 'libsvm'\nfeatures.2.weights = 'w'", "feature 'tags': weights does not go with libsvm: the i"),
    ("data.format = 'libsvm'\nlabels.weight = 'w'", "weight = 'w': libsvm has no column for example weights"),
    ("data.train = '${NO_SUCH_VARIABLE}/a.parquet'", "${NO_SUCH_VARIABLE} is not set in the environment; export"),
    ("model.name = 'nothing.py:Model'", "[model].name = 'nothing.py:Model': no such file: "),
    ("model.name = 'no_such_package.models:Model'", "no module 'no_such_package.models' on the import path"),
]  # fmt: skip

CASES = [*UNKNOWN, *WRONG_TYPES, *MISSING, *OUT_OF_RANGE, *AT_ODDS]

NEEDS_VALID = [
    ("train.early_stopping.metric = 'auc'", "early_stopping needs validation data; set data.valid"),
    ("train.lr_schedule.name = 'ReduceLROnPlateau'", "ReduceLROnPlateau needs validation data; set data.valid"),
    ("train.evaluate_every_steps = 2", "evaluate_every_steps needs validation data; set data.valid"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CASES, ids=[change for change, _ in CASES])
def test_a_config_that_cannot_be_used(site, change, message):
    site.configure(change)
    line = site.refusal(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert message in line


def test_the_config_that_the_others_differ_from_is_good(site):
    assert "AUC" in site.girih(*site.train())
    assert (site / "run" / "summary.json").is_file()


@pytest.mark.parametrize(("change", "message"), NEEDS_VALID, ids=[change for change, _ in NEEDS_VALID])
def test_an_option_that_does_nothing_without_validation_data(site, change, message):
    site.configure(f"data.valid = 'GONE'\n{change}")
    assert message in site.refusal(*site.train())


def test_a_schedule_that_ends_before_the_run_does(site):
    schedule = "{name = 'OneCycleLR', max_lr = 0.1, total_steps = 3, interval = 'step'}"
    site.configure(f"train.lr_schedule = {schedule}")
    line = site.refusal_after_writing(*site.train(), before=None)
    assert line == "lr_schedule: OneCycleLR: Tried to step 4 times. The specified number of total steps is 3"


def test_a_device_that_is_not_there(site, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    site.configure("train.device = 'cuda'")
    line = site.refusal(*site.train())
    assert "device = 'cuda': torch finds no CUDA device here; use 'cpu' or 'auto'" in line
    assert f"torch {torch.__version__} is built {'for' if torch.version.cuda else 'without'} CUDA" in line


def test_tensorboard_that_is_not_installed(site, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    site.configure("train.tensorboard = true")
    assert "not installed; pip install 'girih[tensorboard]'" in site.refusal(*site.train())

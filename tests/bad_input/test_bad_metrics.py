"""Metrics of the user's own that cannot be loaded or called: one line, before the first step."""

import pytest

from girih import cli

NAMED = {
    "no such file": ("['nothing.py:f']", "train.metrics = 'nothing.py:f': no such file: "),
    "no such package": ("['no_such_package.metrics:f']", "no module 'no_such_package.metrics' on the import path"),
    "no such function": ("['own.py:brire']", "own.py has no function 'brire'; did you mean 'brier'?"),
    "no function": ("['own.py:NUMBER']", "'own.py:NUMBER': NUMBER is not a function"),
    "a class": ("['own.py:Brier']", "metric Brier of label 'click': TypeError: "),
    "a built-in one": ("['auc']", "train: metrics: 'auc': expected path/to/file.py:function, package.module:"),
    "a name of girih's": ("['own.py:logloss']", "names other than girih's: mrr, auc, auprc, calibration, epoch, examples,"),
    "no source": ("['brier']", "metrics: 'brier': expected path/to/file.py:function, package.module:function, or from Python a function; names other than girih's: mrr, auc,"),
    "nothing at all": ("['empty.py:f']", "empty.py has no function 'f'; there are none"),
    "a string": ("'own.py:brier'", "[train] metrics = 'own.py:brier': expected a list"),
    "a number": ("[1]", "train: metrics: 1: expected path/to/file.py:function"),
}  # fmt: skip
BODIES = {
    "too few": ("def f(labels): return 0.0", "TypeError: f() takes 1 positional argument but 2 were given"),
    "another argument": ("def f(a, b, c): return 0.0", "missing 1 required positional argument: 'c'"),
    "no groups": ("def f(a, b, groups): return max(groups)", "TypeError: 'NoneType' object is not iterable"),
    "it raises": ("def f(a, b):\n    raise KeyError('day')", "f of label 'click': KeyError: 'day' at "),
    "nan": ("def f(a, b): return float('nan')", "f of label 'click': returned nan; expected a finite number for random"),
    "infinite": ("def f(a, b): return 1e400", "returned inf; expected"),
    "an array": ("def f(a, b): return a", "returned a ndarray; expected"),
    "none": ("def f(a, b): pass", "returned None; expected"),
    "text": ("def f(a, b): return '0.5'", "returned a str; expected"),
    "a generator": ("def f(a, b): yield 0.5", "returned a generator; expected"),
    "syntax": ("def f(a, b) return 0.5", "own.py failed to load: SyntaxError: "),
}  # fmt: skip
GOOD = "class Brier: pass\nNUMBER = 5\ndef logloss(a, b): return 0.0\ndef brier(a, b): return ((a - b) ** 2).mean()\n"


def check_refusal(site, capsys, *words):
    assert cli.run(["check", str(site.config_file), *words]) == 2
    return capsys.readouterr().err.removeprefix("girih: ").removesuffix("\n")


@pytest.mark.parametrize(("names", "message"), NAMED.values(), ids=NAMED)
def test_a_name_that_is_no_metric(site, capsys, names, message):
    (site / "own.py").write_text(GOOD)
    (site / "empty.py").touch()
    site.configure(f"train.metrics = {names}")
    line = site.refusal(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert message in line
    assert check_refusal(site, capsys) == line


@pytest.mark.parametrize(("body", "message"), BODIES.values(), ids=BODIES)
def test_a_function_that_is_no_metric(site, capsys, body, message):
    (site / "own.py").write_text(body + "\n")
    site.configure("train.metrics = ['own.py:f']")
    line = site.refusal(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert message in line
    if "raise" in body:
        assert f"{site / 'own.py'}:2" in line
    assert check_refusal(site, capsys) == line
    assert check_refusal(site, capsys, "--set", "strategy={name='synchronous', trainers=2}") == line


WATCHED = {
    "no such mode": ("early_stopping = {metric = 'brier', mode = 'less'}", "mode = 'less': expected one of 'min', 'max'"),
    "not a metric": ("early_stopping = {metric = 'brire', mode = 'min'}", "'brire': expected one of auc, auprc, gauc, uauc, logloss, normalized_entropy, mae, rmse, brier; did you mean 'brier'?"),
}  # fmt: skip


@pytest.mark.parametrize(("option", "message"), WATCHED.values(), ids=WATCHED)
def test_a_metric_that_cannot_be_watched(site, option, message):
    (site / "own.py").write_text(GOOD)
    site.configure(f"train.metrics = ['own.py:brier']\ntrain.{option}")
    assert message in site.refusal(*site.train())

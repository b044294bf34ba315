"""Words on the command line that cannot be used, and config files that cannot be read."""

import os
import subprocess
import sys

import pytest

USAGE = [
    (["trian"], "No such command 'trian'; did you mean 'train'?"),
    (["train", "config.toml", "--epochs", "3"], "No such option '--epochs'; write --set train.epochs=3"),
    (["train", "--batch-size=64", "config.toml"], "No such option '--batch-size'; write --set data.batch_size=64"),
    (["check", "config.toml", "--compile"], "No such option '--compile'; write --set train.compile=VALUE"),
    (["evaluate", "run", "--epochs", "3"], "No such option '--epochs'."),
    (["evaluate", "config.toml"], "config.toml: names a config file; expected a run directory, as runs/first"),
    (["predict", "config.toml", "--data", "test.parquet", "--out", "o.csv"], "expected a run directory, as runs/first"),
    (["train"], "Missing argument 'CONFIG.toml'"),
    (["train", "config.toml", "more.toml"], "unexpected extra argument"),
    (["train", "config.toml", "--rnu", "run"], "No such option '--rnu'. (Did you mean one of: '--resume', '--run'?)"),
    (["train", "config.toml", "--run"], "Option '--run' requires an argument"),
    (["train", "config.toml", "--resume"], "--resume needs --run DIR, the directory of the run to continue"),
    (["train", "config.toml", "--strategy", "hybird"], "[strategy]: unknown name 'hybird'; did you mean 'hybrid'?"),
    (["evaluate"], "Missing argument 'RUN'"),
    (["predict", "run"], "Missing option '--data'"),
    (["predict", "run", "--data", "test.parquet"], "Missing option '--out'"),
    (["inspect"], "Missing argument 'RUN|CHECKPOINT'"),
    (["report"], "Missing argument 'RUN...'"),
    (["info", "all"], "unexpected extra argument"),
]  # fmt: skip

SETTINGS = [
    ("train.epochs", "--set 'train.epochs': expected section.key=value, for example train.epochs=2"),
    ("=2", "--set '=2': expected section.key=value"),
    ("labels.names=[rating, other]", """--set 'labels.names=[rating, other]': strings in a list need quotes, for example --set 'labels.names=["rating", "other"]'"""),
    ("train.=2", "--set 'train.=2': expected section.key=value"),
    ("epochs=2", "--set 'epochs=2': expected section.key=value"),
    ("trian.epochs=2", "unknown section [trian]; did you mean 'train'?"),
    ("train.epohcs=2", "[train]: unknown key 'epohcs'; did you mean 'epochs'?"),
    ("train.epochs=two", "[train] epochs = 'two': expected an integer"),
    ("train.seed.first=2", "--set 'train.seed.first=2': train.seed is not a table of options"),
    ("features.usr.dim=2", "--set 'features.usr.dim=2': features has no feature named 'usr'; did you mean 'user'?"),
    ("features.user.dimm=2", "[[features]] 'user': unknown key 'dimm'; did you mean 'dim'?"),
    ("features.user=2", "--set 'features.user=2': features is a list; expected the name of a feature or table, and a key"),
    ("defaults.dimm=2", "[defaults]: unknown key 'dimm'; did you mean 'dim'?"),
    ("defaults.dim=0", "[defaults] dim = 0: expected an integer from 1 to 4096"),
    ("model={name='nothing'}", "[model].name = 'nothing': unknown model; "),
]  # fmt: skip

BROKEN = {
    "not TOML": (b"[data\ntrain = 3", "not valid TOML: Expected ']' at the end of a table declaration (at line 1"),
    "a value without quotes": (b"[data]\ntrain = a.parquet\n", 'not valid TOML: Invalid value (at line 2, column 9); text needs quotes: train = "a.parquet"'),
    "Python's truth": (b"[data]\nshuffle = True\n", "; write shuffle = true"),
    "a section twice": (b"[data]\ntrain = 'a'\n[data]\nvalid = 'b'\n", "; join the two sections"),
    "one of several in single brackets": (b"[features]\nname = 'a'\n[features]\nname = 'b'\n", "(at line 3, column 10); several of them are written [[features]]"),
    "a key twice": (b"[data]\ntrain = 'a'\ntrain = 'b'\n", "not valid TOML: Cannot overwrite a value (at line 3"),
    "empty": (b"", "section [data] is missing"),
    "binary": (bytes(range(256)), "not UTF-8 text (invalid start byte at byte 128)"),
    "Latin-1": ("[data]\ntrain = 'Müll'".encode("latin-1"), "not UTF-8 text (invalid start byte at byte 17)"),
    "UTF-16": ("[data]\ntrain = 'a'".encode("utf-16"), "not UTF-8 text"),
    "control characters": (bytes(range(128)), "not valid TOML: "),
    "Parquet": (b"PAR1\x15\x04\xff\xff", "not UTF-8 text"),
    "no name for a variable": (b"[data]\ntrain = '${}/a'\n", "${} is not set in the environment"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), USAGE, ids=[" ".join(words) for words, _ in USAGE])
def test_usage(site, words, message):
    assert message in site.refusal(*words)


@pytest.mark.parametrize(("setting", "message"), SETTINGS, ids=[setting for setting, _ in SETTINGS])
def test_overrides(site, setting, message):
    assert message in site.refusal(*site.train("--set", setting))


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_config_files_that_cannot_be_read(site, content, message):
    site.config_file.write_bytes(content)
    line = site.refusal(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert message in line


@pytest.mark.parametrize("content", [b"user,item,click\n1,2,0\n", b"PAR1\x15\xff"])
def test_data_in_the_place_of_a_config(site, content):
    (site.directory / "clicks.csv").write_bytes(content)
    line = site.refusal("train", site.directory / "clicks.csv", "--run", site / "run")
    assert line.endswith("; expected a config in TOML, for example from girih init DATA > config.toml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.toml", "nothing.toml: no such config file; expected a TOML file"),
        ("temporary", "temporary: no such config file (it is a directory); expected a TOML file"),
        ("x" * 300 + ".toml", "file name too long; check the path"),
    ],
    ids=["missing", "a directory", "a long name"],
)
def test_a_config_that_is_no_file(site, name, message):
    assert message in site.refusal("train", site / name, "--run", site / "run")


def test_a_run_directory_with_too_long_a_name(site):
    assert "File name too long" in site.refusal("train", site.config_file, "--run", site / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_config_that_may_not_be_read(site):
    site.config_file.chmod(0)
    assert f"{site.config_file}: not readable; check its permissions" in site.refusal(*site.train())


OUTSIDE = [
    (["train", "nothing.toml"], "nothing.toml: no such config file; expected a TOML file"),
    (["train", "config.toml", "--run", "run", "--set", "model.nmae=3"], "unknown option 'nmae'"),
    (["evaluate", "nowhere"], "nowhere: no such run directory"),
    (["report", "clicks.csv"], "clicks.csv: is a file; give a run directory"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), OUTSIDE, ids=[" ".join(words) for words, _ in OUTSIDE])
def test_the_program_itself(site, words, message):
    words = [sys.executable, "-m", "girih", *words]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=site.directory)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("girih: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (site / "run").exists()


def test_the_program_without_words_shows_its_commands(site):
    done = subprocess.run([sys.executable, "-m", "girih"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for command in ("train", "evaluate", "predict", "inspect", "report", "info"):
        assert command in done.stderr
    assert "Traceback" not in done.stderr

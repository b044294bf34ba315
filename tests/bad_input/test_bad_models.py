"""Models of the user's own that cannot be loaded, built or run: one line that names their file and line."""

import pytest

from girih import cli

HEAD = "import torch\nfrom torch import nn\n\n\n"
FORWARD = HEAD + "class Own(nn.Module):\n    def forward(self, numeric, embeddings):\n        "

FILES = {
    "a name that does not exist": ("import troch\n", "failed to load: ModuleNotFoundError: No module named 'troch'"),
    "an error on import": ("1 / 0\n", "failed to load: ZeroDivisionError: division by zero at "),
    "no such class": (HEAD + "class Onw(nn.Module):\n    pass\n", "has no class 'Own'; did you mean 'Onw'?"),
    "not a module": ("class Own:\n    pass\n", "Own is not a class derived from torch.nn.Module"),
    "a constructor that fails": (HEAD + "class Own(nn.Module):\n    def __init__(self, schema):\n        raise KeyError('price')\n", "could not be built: KeyError: 'price' at "),
    "a constructor that wants more": (HEAD + "class Own(nn.Module):\n    def __init__(self, schema, width):\n        super().__init__()\n", "option 'width' is missing"),
}  # fmt: skip

FORWARDS = {
    "no axis of labels": ("return numeric[:, 0]", "Own.forward returned logits of shape [32]; expected [32, 1]: "),
    "a label too many": ("return numeric.repeat(1, 2)", "returned logits of shape [32, 2]; expected [32, 1]: a row"),
    "a scalar": ("return numeric.sum()", "returned logits of shape []; expected [32, 1]: a row per example"),
    "a row too few": ("return numeric[1:]", "returned logits of shape [31, 1]; expected [32, 1]: a row per exampl"),
    "a tuple": ("return numeric, numeric", "Own.forward returned a tuple; expected logits, a tensor of a row per"),
    "nothing": ("pass", "Own.forward returned a NoneType; expected logits, a tensor of a row per example"),
    "a feature that is not there": ("return embeddings['usr']", "Own.forward failed: "),
    "widths that do not fit": ("return numeric @ numeric", "Own.forward failed: RuntimeError: mat1 and mat2 sha"),
    "an argument too many": ("return numeric.sum(1, 2, 3, 4)", "Own.forward failed: "),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_a_file_that_holds_no_model(site, text, message):
    (site / "own.py").write_text(text)
    site.configure("model.name = 'own.py:Own'")
    line = site.refusal(*site.train())
    assert line.startswith(f"{site.config_file}: ")
    assert message in line


@pytest.mark.parametrize(("body", "message"), FORWARDS.values(), ids=FORWARDS)
def test_a_forward_that_does_not_give_logits(site, capsys, body, message):
    (site / "own.py").write_text(FORWARD + body + "\n")
    site.configure("model.name = 'own.py:Own'")
    line = site.refusal(*site.train())
    assert message in line
    for strategy in ("local", "hybrid"):
        assert cli.run(["check", str(site.config_file), "--strategy", strategy]) == 2
        assert capsys.readouterr().err == f"girih: {line}\n"
    if "failed" in message:
        assert f"{site / 'own.py'}:7" in line


def test_a_signature_that_is_not_that_of_a_model(site):
    (site / "own.py").write_text(
        HEAD + "class Own(nn.Module):\n    def forward(self, x):\n        return x\n"
    )
    site.configure("model.name = 'own.py:Own'")
    assert "Own.forward failed: TypeError: " in site.refusal(*site.train())


def test_a_model_without_forward_fails_the_check(site, capsys):
    (site / "own.py").write_text(HEAD + "class Own(nn.Module):\n    pass\n")
    site.configure("model.name = 'own.py:Own'")
    assert cli.run(["check", str(site.config_file)]) == 2
    assert "Own.forward failed: NotImplementedError: " in capsys.readouterr().err


def test_a_model_whose_file_has_gone(site):
    (site / "own.py").write_text(FORWARD + "return numeric * embeddings['user'].sum(1, keepdim=True)\n")
    site.configure("model.name = 'own.py:Own'")
    site.girih(*site.train())
    (site / "own.py").unlink()
    line = site.refusal("evaluate", site / "run")
    assert line.startswith(f"{site / 'run' / 'config.toml'}: ")
    assert "no such file: " in line


def test_a_loss_that_is_not_a_number_is_no_mistake_of_the_config(site, capsys):
    (site / "own.py").write_text(FORWARD + "return numeric / 0 * 0 + embeddings['user'][:, :1]\n")
    site.configure("model.name = 'own.py:Own'")
    assert cli.run([str(word) for word in site.train()]) == 1
    line = capsys.readouterr().err
    assert line.startswith(
        "girih: step 1: the loss is nan; none of its updates were applied. Lower the learning rate"
    )
    assert line.count("\n") == 1

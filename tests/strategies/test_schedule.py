"""``[schedule]``: every switch on, off and combined learns the same.

What is done ahead, and when rows come, changes no sum, so that these runs are equal bit for bit. Where batches are cut, gradients of
parameters are summed by micro-batches first; where tables are grouped otherwise, some models add up their features in another order.
"""

from collections import Counter

import pytest
import torch
from scenes import STEPS, play, play_all, write

from runs import difference

pytestmark = pytest.mark.slow

ROWS, DENSE = 2e-5, 3e-5
SHORT = 20
CUT = "schedule.micro_batches=3"
FROM_MLP = 'schedule.micro_batches_from="mlp"'
OFF = "schedule.prefetch=false"
UNPACKED = "schedule.packing=false"
IN_TURN = "schedule.interleaving_groups=2"
AHEAD = 'schedule.excluded=["tags"]'
WHOLE = {"off": [OFF], "prefetch": [], "unpacked": [UNPACKED]}
IN_PARTS = {"cut": [CUT, OFF], "cut-mlp": [CUT, FROM_MLP], "cut-unpacked": [CUT, UNPACKED]}
WHOLE_IN_TURN = {"turns": [IN_TURN], "turns-ahead": [IN_TURN, AHEAD, OFF]}
PARTS_IN_TURN = {"cut-turns": [CUT, UNPACKED, IN_TURN, AHEAD]}
SAME_GROUPS = (("off", "prefetch", "cut", "cut-mlp"), ("unpacked", "cut-unpacked"))
"""Runs whose bytes are equal: a table's number in its group decides where its keys live."""
SAME_BITS = (("off", "prefetch"), ("cut", "cut-mlp"))


def scenes(strategy, laid_out, config, steps):
    return [
        {
            "name": f"{strategy}-{config}-{name}-{steps}",
            "config": config,
            "strategy": strategy,
            "overrides": [*options, f"train.max_steps={steps}"],
        }
        for name, options in laid_out.items()
    ]


def check(directory, config, steps):
    whole = scenes("local", WHOLE, config, steps)
    parts = scenes("local", IN_PARTS, config, steps)
    for scene in (*whole, *parts):
        play(directory, scene)
    two_whole = scenes("synchronous", WHOLE | WHOLE_IN_TURN, config, steps)
    two_parts = scenes("synchronous", IN_PARTS | PARTS_IN_TURN, config, steps)
    summaries = play_all(directory, [*two_whole, *two_parts], 2)
    for strategy in ("local", "synchronous"):
        for first, *others in SAME_BITS:
            for other in others:
                one, two = (directory / f"{strategy}-{config}-{name}-{steps}" for name in (first, other))
                assert difference(one, two) == (0, 0), two.name
    for scene in (*whole, *parts, *two_whole, *two_parts):
        rows, dense = difference(directory / whole[0]["name"], directory / scene["name"])
        assert rows < ROWS, scene["name"]
        assert dense < DENSE, scene["name"]
    sent = {
        name: summaries[f"synchronous-{config}-{name}-{steps}"]["wire_bytes"]
        for name in (*WHOLE, *WHOLE_IN_TURN, *IN_PARTS, *PARTS_IN_TURN)
    }
    for alike in SAME_GROUPS:
        for kind in ("dense", "embeddings", "gradients"):
            assert len({sent[name][kind] for name in alike}) == 1, (alike, kind)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("schedule"), held_out=101)


@pytest.mark.parametrize("config", ["din"])
def test_every_switch_learns_the_same(directory, config):
    check(directory, config, SHORT)


@pytest.mark.heavy
@pytest.mark.timeout(900)  # fifteen runs of 200 steps, on a machine that does other things too
@pytest.mark.parametrize("config", ["deepfm", "din", "mmoe"])
def test_every_switch_learns_the_same_in_all_steps(directory, config):
    check(directory, config, STEPS)


def test_other_strategies_cut_and_prepare_too(directory):
    """Under ``hybrid`` the workers prepare, under ``substitution`` each trainer its own features."""
    steps = [f"train.max_steps={SHORT}"]
    runs = [
        ("hybrid", ["staleness=0"], [CUT, FROM_MLP]),
        ("hybrid", ["staleness=0"], [OFF]),
        ("substitution", ['dense="split"'], [CUT]),
        ("substitution", ['dense="replicated"'], [CUT, FROM_MLP, OFF]),
    ]
    found = [
        {"name": f"{name}-{n}", "strategy": name, "options": options, "overrides": [*more, *steps]}
        for n, (name, options, more) in enumerate(runs)
    ]
    play(directory, {"name": "reference", "overrides": [OFF, *steps]})
    play_all(directory, found, 2)
    for scene in found:
        rows, dense = difference(directory / "reference", directory / scene["name"])
        assert rows < ROWS, scene["name"]
        assert dense < DENSE, scene["name"]


def test_micro_batches_from_the_mlp_bound_the_activations_that_wait_for_the_backward_pass(directory):
    wide = ["model.hidden=[512, 512]", "data.batch_size=256", "train.max_steps=2", OFF]
    peaks = {}
    for name, words in (("uncut", []), ("cut", ["schedule.micro_batches=4", FROM_MLP])):
        saved = Saved()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
            play(directory, {"name": f"saved-{name}", "overrides": [*wide, *words]})
        assert saved.bytes == 0
        peaks[name] = saved.most_bytes
    assert peaks["uncut"] > 2 * 256 * 512 * 4  # both layers' outputs, at least
    assert 0.25 * peaks["uncut"] <= peaks["cut"] < 0.3 * peaks["uncut"]


class Saved:
    """Bytes of activations that autograd keeps, now and at most; what several operations keep counts once, parameters do not."""

    def __init__(self):
        self.bytes = self.most_bytes = 0
        self.holders = Counter()

    def pack(self, tensor):
        return Kept(self, tensor)


class Kept:
    def __init__(self, saved, tensor):
        self.saved, self.tensor = saved, tensor
        of_parameter = tensor.requires_grad and (tensor if tensor._base is None else tensor._base).is_leaf
        self.key = None if of_parameter else (tensor.data_ptr(), tensor.nbytes)
        if self.key is not None:
            saved.bytes += tensor.nbytes * (saved.holders[self.key] == 0)
            saved.holders[self.key] += 1
            saved.most_bytes = max(saved.most_bytes, saved.bytes)

    def __del__(self):
        if self.key is not None:
            self.saved.holders[self.key] -= 1
            self.saved.bytes -= self.tensor.nbytes * (self.saved.holders[self.key] == 0)

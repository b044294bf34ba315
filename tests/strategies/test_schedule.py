"""``[schedule]``: every switch on, off and combined learns the same.

Work that is done ahead changes no sum, so these runs are equal bit for bit. Sums over a key's examples are formed in the same order
whatever group the key's table is in, so packing changes no bit either if the model reads the same numbers. A model that adds up features
block by block (DeepFM does) adds them in another order then, and if batches are cut, gradients are summed by micro-batch first.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from matrix import DENSE, ROWS, VARIANTS, Runs, Workload, cells
from scenes import STEPS, play, write

from girih.app.run_config import RunConfig
from girih.errors import ConfigError
from girih.strategies import BY_NAME
from runs import difference

HALF = STEPS // 2
CUT, FROM_MLP = "schedule.micro_batches=3", 'schedule.micro_batches_from="mlp"'
OFF, UNPACKED = "schedule.prefetch=false", "schedule.packing=false"
IN_TURN, AHEAD = "schedule.interleaving_groups=2", 'schedule.excluded=["tags"]'
SAVES = f"checkpoint.every_steps={HALF}"
SWITCHES = {
    "packed": (SAVES,),
    "unpacked": (UNPACKED, SAVES),
    "no-prefetch": (OFF,),
    "turns": (IN_TURN,),
    "turns-ahead": (IN_TURN, AHEAD, OFF),
    "turns-auto": ("schedule.interleaving_groups=auto",),
    "unpacked-turns": (UNPACKED, "schedule.interleaving_groups=3"),
    "cut": (CUT, OFF),
    "cut-mlp": (CUT, FROM_MLP),
    "cut-mlp-alone": (CUT, FROM_MLP),
    "cut-mlp-no-prefetch": (CUT, FROM_MLP, OFF),
    "cut-unpacked": (CUT, UNPACKED),
    "cut-turns": (CUT, UNPACKED, IN_TURN, AHEAD),
}
WORKLOADS = {
    **{name: Workload("din", switches) for name, switches in SWITCHES.items()},
    "then-unpacked": Workload("din", (UNPACKED,), resumes="packed", from_step=HALF),
    "then-packed": Workload("din", resumes="unpacked", from_step=HALF),
    **{f"deepfm-{name}": Workload(overrides=switches) for name, switches in SWITCHES.items()},
    **{f"mmoe-{name}": Workload("mmoe", switches) for name, switches in SWITCHES.items()},
}
SAME_BITS = {
    "no-prefetch": "packed",
    "unpacked": "packed",
    "turns": "packed",
    "turns-ahead": "packed",
    "turns-auto": "packed",
    "unpacked-turns": "packed",
    "then-unpacked": "packed",
    "then-packed": "packed",
    "cut-mlp": "cut",
}
"""Workload → the workload whose results are equal bit for bit under the same strategy."""
SAME_BYTES = {"no-prefetch": "packed", "cut": "packed", "cut-mlp": "packed", "cut-unpacked": "unpacked"}
"""Workload → the workload that sends as many bytes. A table's number in its group decides where its keys live."""
LOCAL = VARIANTS["local"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(write(tmp_path_factory.mktemp("schedule"), held_out=50), WORKLOADS)


@pytest.mark.timeout(900)  # 200 steps a run in make test-all
@pytest.mark.parametrize(("variant", "workload"), cells(WORKLOADS))
def test_every_switch_learns_the_same_as_local(runs, variant, workload):
    model = workload.split("-")[0]
    plain = "packed" if model not in ("deepfm", "mmoe") else f"{model}-packed"
    run = runs.of(variant, workload)
    assert run.summary["steps"] == STEPS
    rows, dense = difference(runs.of(LOCAL, plain).path, run.path)
    assert rows < ROWS
    assert dense < DENSE


@pytest.mark.parametrize(("variant", "workload"), cells(SAME_BITS))
def test_work_in_another_order_changes_no_bit(runs, variant, workload):
    equal = runs.of(variant, SAME_BITS[workload])
    assert difference(equal.path, runs.of(variant, workload).path) == (0, 0)


@pytest.mark.parametrize(("variant", "workload"), cells(SAME_BYTES, lambda variant: variant.can_interleave))
def test_the_same_groups_send_the_same_bytes(runs, variant, workload):
    expected, sent = (
        runs.of(variant, each).summary["wire_bytes"] for each in (SAME_BYTES[workload], workload)
    )
    for kind in ("dense", "embeddings", "gradients"):
        assert sent[kind] == expected[kind], kind


@pytest.mark.parametrize(
    ("variant", "workload"), cells("packed unpacked turns turns-ahead turns-auto unpacked-turns")
)
def test_the_plan_orders_groups_if_it_is_asked_to(runs, variant, workload):
    plan = runs.of(variant, workload).summary.get("plan", {})
    assert (plan.get("interleaving") is not None) == (workload not in ("packed", "unpacked"))


@pytest.mark.parametrize("strategy", BY_NAME)
def test_switches_that_a_strategy_does_not_support_are_refused(runs, strategy):
    capabilities = BY_NAME[strategy].capabilities
    switches = {
        "the order of groups has no effect": ([IN_TURN], capabilities.interleaving),
        "cuts batches from": ([CUT], "embedding" in capabilities.micro_batch_layers),
        "cuts batches from .* on": ([CUT, FROM_MLP], "mlp" in capabilities.micro_batch_layers),
    }
    for message, (overrides, is_supported) in switches.items():
        settings = RunConfig.load(runs.directory / "din.toml", overrides=overrides, strategy=strategy)
        if is_supported:
            assert settings.planned().strategy == strategy
        else:
            with pytest.raises(ConfigError, match=message):
                settings.planned()


@pytest.mark.slow
def test_micro_batches_from_the_mlp_bound_the_activations_that_wait_for_the_backward_pass(runs):
    wide = ["model.hidden=[512, 512]", "data.batch_size=256", "train.max_steps=2", OFF]
    peaks = {}
    for name, words in (("uncut", []), ("cut", ["schedule.micro_batches=4", FROM_MLP])):
        saved = SavedBytes()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
            play(runs.directory, {"name": f"saved-{name}", "overrides": [*wide, *words]})
        assert saved.bytes == 0
        peaks[name] = saved.most_bytes
    assert peaks["uncut"] > 2 * 256 * 512 * 4  # both layers' outputs, at least
    assert 0.25 * peaks["uncut"] <= peaks["cut"] < 0.3 * peaks["uncut"]


class SavedBytes:
    """Bytes of activations that autograd keeps, now and at most. A tensor of several operations counts once, parameters do not."""

    def __init__(self):
        self.bytes = self.most_bytes = 0
        self.holders = Counter()

    def pack(self, tensor):
        return SavedTensor(self, tensor)


class SavedTensor:
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


@pytest.mark.slow
def test_a_pinned_plan_packs_tables_into_its_groups(runs):
    settings = RunConfig.load(runs.directory / "din.toml", overrides=["train.max_steps=2"])
    plan = settings.planned()
    (group,) = plan.groups
    expected = {"two": ["tags", "item"], "one": ["user"]}

    def pinned(groups):
        edited = tuple({**group, "name": name, "tables": tables} for name, tables in groups.items())
        return replace(settings, plan=replace(plan, groups=edited)).trainer()

    with pinned(expected) as trainer:
        trainer.fit(settings.dataset("train"))
        assert expected == {
            group.spec.name: [table.name for table in group.spec.tables]
            for group in trainer.sparse.groups_of_tables
        }
    with (
        pinned({"one": ["user"], "two": ["tags"]}) as trainer,
        pytest.raises(ConfigError, match="table 'item' is in 0 groups, expected one"),
    ):
        trainer.fit(settings.dataset("train"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in BY_NAME.values() if kind.capabilities.interleaving])
def test_a_plan_that_orders_other_groups_is_refused(runs, kind):
    settings = RunConfig.load(runs.directory / "din.toml", overrides=["train.max_steps=2"])
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        plan = kind().plan(trainer._run.facts)
    edited = replace(plan, schedule={**plan.schedule, "interleaving": [["two"]]})
    with pytest.raises(ConfigError, match="expected each of the groups"):
        edited.check_like(plan)


@pytest.mark.slow
def test_a_checkpoint_of_another_schedule_gets_a_new_plan(runs):
    packed, unpacked = (
        RunConfig.load(runs.directory / "din.toml", overrides=["train.max_steps=2", *words]).planned()
        for words in ((), (UNPACKED,))
    )
    assert not unpacked.fits(packed)
    assert len(unpacked.groups) == 3

"""Hierarchical training (HT): nets, groups and their averages; group servers that run parts of the net; taggings that plans hold."""

import signal
import threading
import time
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from scenes import SIZE, STEPS, play, play_all, write

import girih
import girih.lifecycle.run as training_run
from companions import together
from girih.app.run_config import RunConfig
from girih.cli import run as cli
from girih.comm.service import connect
from girih.errors import ConfigError
from girih.hierarchical.hogwild import HogwildReplica
from girih.planner.calibration import LINKS, Calibration, CodecSpeed, Link
from girih.planner.operators import TRAINER
from girih.planner.plan import Plan
from girih.services.dense_server import DenseServer
from runs import command, dense_of, difference, latest, train
from support.dense_suite import case, dense_spec
from support.votes import apply

heavy = pytest.mark.heavy
EPOCHS = ["train.epochs=3"]
GROUPS = {
    averaging: {
        "name": f"groups-{averaging}",
        "strategy": "hierarchical",
        "options": ["groups=2", "dense_servers=2", f"averaging='{averaging}'", "average_every_steps=4"],
        "overrides": EPOCHS,
    }
    for averaging in ("easgd", "ma", "bmuf")
}
NETS_AND_GROUPS = {
    "name": "nets-and-groups",
    "strategy": "hierarchical",
    "options": ["groups=2", "nets=3", "average_every_steps=2"],
    "overrides": [*EPOCHS, "train.evaluate_every_steps=70"],
    "valid": True,
}
EXAMPLES = 60 * SIZE


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("hierarchical"), num_examples=EXAMPLES, held_out=1001)
    pq.write_table(pq.read_table(directory / "test.parquet").slice(0, 101), directory / "few.parquet")
    return directory


@pytest.fixture(scope="module")
def local(directory):
    return play(directory, {"name": "local", "overrides": EPOCHS})


@pytest.fixture(scope="module")
def two(directory):
    return play_all(directory, [GROUPS["ma"], NETS_AND_GROUPS], 2)


@pytest.fixture(scope="module")
def others(directory):
    return play_all(directory, [GROUPS["easgd"], GROUPS["bmuf"]], 2)


@pytest.mark.slow
def test_several_nets_learn_as_much_as_local_and_measure_their_staleness(directory, local):
    scene = {"name": "nets", "strategy": "hierarchical", "options": ["nets=3"], "overrides": EPOCHS}
    meeting = {
        **scene,
        "overrides": [*EPOCHS, "train.evaluate_every_steps=7", "checkpoint.every_steps=11"],
        "valid": True,
    }
    summary = play(directory, meeting)
    assert summary["num_examples"] == local["num_examples"]
    assert summary["num_rows"] == local["num_rows"]
    assert summary["auc"] == pytest.approx(local["auc"], abs=0.03)
    assert 1 <= summary["staleness_max"] <= 2
    staleness = summary["dense_staleness"]
    assert 0 <= staleness["median"] <= staleness["p99"] <= staleness["max"] == summary["dense_staleness_max"]
    assert staleness["max"] >= 1
    assert summary["lost_updates"] == summary["kept"] == 0


def assert_groups_learn(summary, local):
    assert summary["num_examples"] == local["num_examples"]
    assert summary["auc"] == pytest.approx(local["auc"], abs=0.03)
    assert summary["dense_staleness"]["max"] == 0  # one net each
    assert summary["wire_bytes"]["dense"] > 2 * 4 * summary["dense_parameters"]
    assert all(rounds > 0 for each in summary["rounds"] for rounds in each)


@pytest.mark.slow
def test_two_groups_learn_as_much_as_local(local, two):
    assert_groups_learn(two["groups-ma"], local)


@heavy
@pytest.mark.parametrize("averaging", ["easgd", "bmuf"])
def test_two_groups_learn_as_much_as_local_with_other_averages(local, others, averaging):
    assert_groups_learn(others[f"groups-{averaging}"], local)


@pytest.mark.slow
def test_groups_of_several_nets_evaluate_and_save_together(local, two):
    summary = two["nets-and-groups"]
    assert summary["num_examples"] == local["num_examples"]
    assert summary["auc"] == pytest.approx(local["auc"], abs=0.04)
    assert summary["kept"] == 0
    assert all(rounds > 0 for each in summary["rounds"] for rounds in each)


def average_two_replicas(ranks):
    """Two replicas whose labels are opposite, averaged elastically by a dense server; returns this one's numbers and the centre."""
    stop, reported, address = threading.Event(), threading.Event(), []
    if ranks.first:
        server = DenseServer(
            index=0, num_replicas=2, averaging="easgd", rate=0.2, address="shm://", secret=b"of this run"
        )
        threading.Thread(
            target=server.run, args=(lambda at: (address.append(at), reported.set()), stop)
        ).start()
        reported.wait(20)
    (at,) = ranks.broadcast(address)
    servers = [connect(at, secret=b"of this run")]
    half = HogwildReplica(dense_spec(), ranks, nets=1, servers=servers, average_every_steps=1)
    begun = half.first.parameters[-1].detach().reshape(-1).tolist()
    one = case(0)
    one.batch.labels[:] = ranks.rank
    for _ in range(30):
        apply(half.compute(one.batch, one.embeddings()))
        time.sleep(0.002)
    half.sync()
    live, model = half.first.parameters, list(half.module.parameters())
    bias = live[-1].item(), model[-1].item()
    flat = torch.cat([(a - b).detach().reshape(-1) for a, b in zip(live, model, strict=True)])
    half.restore(half.state())
    same = all(torch.equal(a, b) for a, b in zip(half.first.parameters, model, strict=True))
    half.sync()
    after = list(half.module.parameters())[-1].item()
    ranks.barrier()
    half.close()
    seldom = HogwildReplica(
        dense_spec(), ranks, nets=1, servers=[connect(at, secret=b"of this run")], average_every_steps=1000
    )
    for _ in range(30):
        apply(seldom.compute(one.batch, one.embeddings()))
    alone = seldom.first.parameters[-1].item()
    ranks.barrier()
    seldom.close()
    stop.set()
    return {
        "begun": begun,
        "bias": bias,
        "alone": alone,
        "apart": flat.abs().max().item(),
        "same": same,
        "after": after,
    }


def test_the_centre_lies_between_replicas_until_both_are_restored_to_it():
    zero, one = together(average_two_replicas)
    assert zero["begun"] == one["begun"]
    assert zero["bias"][1] == one["bias"][1]
    assert zero["bias"][0] < zero["bias"][1] < one["bias"][0]  # the bias falls where all labels are 0
    assert one["bias"][0] - zero["bias"][0] < one["alone"] - zero["alone"]
    for each in (zero, one):
        assert each["apart"] > 1e-3
        assert each["same"]
        assert each["after"] == each["bias"][1]


TWO_GROUPS = [
    "strategy.groups=2",
    "strategy.nets=2",
    "strategy.dense_servers=2",
    "strategy.average_every_steps=2",
]
LONG = ["train.epochs=1000000", "train.log_every_steps=2"]


@heavy
def test_all_replicas_resume_after_a_signal(directory, begin):
    running = begin("hierarchical", *TWO_GROUPS, *LONG)
    running.until_it_trains()
    running.process.send_signal(signal.SIGTERM)
    assert "go on with" in running.ends(130)
    stopped_at = int(latest(running.run).name.removeprefix("step-"))
    summary = train(
        directory,
        "hierarchical",
        running.run,
        *TWO_GROUPS,
        *LONG,
        f"train.max_steps={stopped_at + 3}",
        resume=True,
    )
    assert summary["steps"] == stopped_at + 3


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("servers_per_group=-1", "servers_per_group = -1"),
        ("trainers_per_group=2", "set trainers_per_group = 1 and groups = 2"),
        ("wire_activations='int8'", "wire_activations = 'int8': this option is for group servers"),
        ("split_fc=true", "split_fc = True: this option is for group servers, but servers_per_group = 0"),
        ("elastic_rate=1.5", "elastic_rate = 1.5"),
        ("trainers=2", "trainers"),
        ("averaging='mean'", "averaging"),
        ("staleness=2", "staleness"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(directory, tmp_path, monkeypatch, change, reported):
    echoed = []
    monkeypatch.setattr("click.echo", lambda text="", **_: echoed.append(str(text)))
    assert cli(command(directory, "hierarchical", tmp_path / "run", f"strategy.{change}")[3:]) == 2
    assert reported in echoed[-1]
    assert not (tmp_path / "run").exists()


def test_micro_batches_are_refused(directory, tmp_path, monkeypatch):
    echoed = []
    monkeypatch.setattr("click.echo", lambda text="", **_: echoed.append(str(text)))
    words = [
        "plan",
        str(directory / "config.toml"),
        "--strategy",
        "hierarchical",
        "--set",
        "schedule.micro_batches=2",
    ]
    assert cli(words) == 2
    assert "set micro_batches = 1" in echoed[-1]


def test_the_number_of_trainers_must_fit_the_groups(directory):
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node=2"):
        girih.Trainer(torch.nn.Identity(), schema=girih.Schema([girih.Categorical(name="user", dim=4)], labels="click"),
                      strategy=girih.Hierarchical(groups=2))  # fmt: skip


EXACT = {}
"""Of ``local``."""
FEW = "data.test=few.parquet"
"""For runs whose parameters are compared, and not how well they predict."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "num_servers", "tagging", "split_fc", "most"),
    [
        ("deepfm", 2, "refined", "false", 0),
        ("din", 1, "rules", '"auto"', 0),
        # gradients of what several parts read are summed in another order
        pytest.param("mmoe", 3, "none", "false", 3e-5, marks=pytest.mark.heavy),
        ("star", 2, "rules", "false", 3e-6),  # 0 on Intel's processors, 6e-7 on AMD's
        ("weighted", 2, "none", "false", 3e-5),  # which refinement has on one server
        ("deepfm", 2, "refined", '"auto"', 2e-5),
        ("deepfm", 3, "refined", "true", 2e-5),
        pytest.param("mmoe", 2, "rules", "true", 2e-5, marks=pytest.mark.heavy),
    ],
)
def test_group_servers_of_one_trainer_with_one_net_equal_local(
    directory, config, num_servers, tagging, split_fc, most
):
    few = {"overrides": [f"train.max_steps={STEPS}", *([FEW] if config != "weighted" else [])]}
    if not (directory / f"local-{config}").exists():
        play(directory, {"name": f"local-{config}", "config": config, **few})
    name = f"one-{config}-{num_servers}-{split_fc.strip(chr(34))}"
    scene = {"name": name, "config": config, "strategy": "hierarchical", **few}
    options = [f"servers_per_group={num_servers}", f'tagging="{tagging}"', f"split_fc={split_fc}"]
    summary = play(directory, {**scene, "options": options})
    assert summary["dense_staleness"] == {"median": 0, "p99": 0, "max": 0}
    assert summary["wire_bytes"]["activations"] > 0
    assert max(difference(directory / f"local-{config}", directory / scene["name"])) <= most


@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_of_all_parts(directory):
    words = [FEW, "train.max_steps=6", "train.clip_norm=0.02"]
    play(directory, {"name": "free", "overrides": words[:2]})
    play(directory, {"name": "clipped", "overrides": words})
    scene = {"strategy": "hierarchical", "overrides": words}
    for name, split, most in (("whole", "false", 0), ("parts", "true", 2e-5)):
        options = ["servers_per_group=2", f"split_fc={split}"]
        play(directory, {**scene, "name": f"clipped-{name}", "options": options})
        assert max(difference(directory / "clipped", directory / f"clipped-{name}")) <= most
    assert max(difference(directory / "clipped", directory / "free")) > 0.01


@pytest.mark.slow
def test_a_checkpoint_loads_with_other_splits(directory):
    """A run with layers in two parts goes on with three, and under ``local``; both come out where it does in one go."""
    grouped = {"strategy": "hierarchical", "options": ["servers_per_group=2", "split_fc=true"]}
    play(directory, {**grouped, "name": "whole", "overrides": [FEW, "train.max_steps=6"]})
    play(directory, {**grouped, "name": "half", "overrides": [FEW, "train.max_steps=3"]})
    then = {"load": "half", "overrides": [FEW, "train.max_steps=6"]}
    three = [*grouped["options"][1:], "servers_per_group=3"]
    play(directory, {**grouped, **then, "name": "three", "options": three})
    play(directory, {**then, "name": "local-then"})
    for name in ("three", "local-then"):
        assert max(difference(directory / "whole", directory / name)) < 1e-5
    models = [set(dense_of(latest(directory / name))) for name in ("whole", "local-then")]
    assert models[0] == models[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "gradients"),
    [("int8", "topk"), ("bfloat16", "bfloat16")],
)
@pytest.mark.heavy
def test_compressed_activations_and_gradients_learn_nearly_as_much(directory, activations, gradients):
    overrides = ["train.epochs=3"]
    if not (directory / "exact").exists():
        EXACT.update(play(directory, {"name": "exact", "overrides": overrides}))
    name, options = f"wire-{activations}", ["servers_per_group=2", f'wire_activations="{activations}"']
    scene = {"name": name, "strategy": "hierarchical", "overrides": overrides}
    summary = play(directory, {**scene, "options": [*options, f'wire_dense_gradients="{gradients}"']})
    assert summary["auc"] == pytest.approx(EXACT["auc"], abs=0.03)


AUTO = [
    "strategy.servers_per_group=2",
    'strategy.wire_activations="auto"',
    'strategy.wire_dense_gradients="auto"',
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_per_s", "expected", "reason"),
    [
        (1e4, ("bfloat16", "topk"), "examples/s predicted, "),  # rows are so narrow that int8 is no smaller
        (1e12, ("float32", "float32"), "which does not pay"),
        (None, ("float32", "float32"), "the speed of this machine's codecs is not known"),
    ],
)
def test_a_plan_chooses_codecs_by_links_and_cores(directory, bytes_per_s, expected, reason):
    settings = RunConfig.load(directory / "deepfm.toml", overrides=AUTO, strategy="hierarchical")
    calibration = None
    if bytes_per_s is not None:
        speeds = dict.fromkeys(("float32", "bfloat16", "int8", "topk"), CodecSpeed(1e-9, 1e-9))
        links = dict.fromkeys(LINKS, Link(1e-5, bytes_per_s))
        calibration = Calibration(trainers=2, machine={"cores": 4}, links=links, codecs=speeds)
    plan = settings.planned(calibration)
    assert (plan.wire["activations"], plan.wire["dense_gradients"]) == expected
    assert reason in plan.predicted["wire"]["why"]
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.slow
def test_trainers_and_nets_of_a_group_share_one_copy(directory):
    options = ["trainers_per_group=2", "servers_per_group=2", "nets=2"]
    (summary,) = play_all(
        directory, [{"name": "group", "strategy": "hierarchical", "options": options}], 2
    ).values()
    assert summary["auc"] > 0.55
    assert summary["dense_staleness"]["max"] > 0


@pytest.mark.slow
def test_groups_are_averaged_by_dense_servers(directory):
    options = ["groups=2", "servers_per_group=2", "nets=2", "dense_servers=2", "average_every_steps=3"]
    scene = {"name": "groups", "strategy": "hierarchical", "options": options}
    (summary,) = play_all(directory, [scene], 2).values()
    assert summary["auc"] > 0.55
    assert [len(each) for each in summary["rounds"]] == [2, 2]
    assert all(rounds > 0 for each in summary["rounds"] for rounds in each)


SERVERS = 2
SPLIT = [f"servers_per_group={SERVERS}", "split_fc=true"]
SWAPPED = {TRAINER: TRAINER, "server 0": "server 1", "server 1": "server 0"}


@pytest.fixture(scope="module")
def small_directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("held"), num_examples=160, held_out=10)


@pytest.fixture(scope="module")
def planned(small_directory):
    return plan_of(small_directory, "deepfm", SPLIT)


def plan_of(small_directory, config, options, strategy="hierarchical"):
    words = [f"strategy.{option}" for option in options]
    return RunConfig.load(small_directory / f"{config}.toml", overrides=words, strategy=strategy).planned()


def swapped(plan):
    """Another placement than any that would be decided."""
    devices = {name: SWAPPED[device] for name, device in plan.tagging.devices.items()}
    return replace(plan, tagging=replace(plan.tagging, devices=devices))


def grouped_scene(name, **more):
    return {"name": name, "strategy": "hierarchical", "options": SPLIT, **more}


def parts_of_servers(trainer):
    """Operators that begin the parts of each server, as the servers tell them."""
    reported = trainer.dense.processes()
    return [reported[f"group-server {number}"]["parts"] for number in range(SERVERS)]


@pytest.mark.slow
def test_a_plan_has_devices_and_split_layers(planned):
    assert planned.tagging.cut
    parts = [f"{layer}.part_{number}" for layer in planned.tagging.cut for number in range(SERVERS)]
    assert {planned.tagging.devices[part] for part in parts} == {"server 0", "server 1"}
    assert Plan.from_dict(planned.to_dict()) == planned


@pytest.mark.slow
def test_a_strategy_without_group_servers_plans_no_tagging(small_directory, planned):
    assert plan_of(small_directory, "deepfm", [], "local").tagging is None
    assert plan_of(small_directory, "deepfm", ["nets=2"]).tagging is None
    given = replace(plan_of(small_directory, "deepfm", [], "local"), tagging=planned.tagging)
    with pytest.raises(ConfigError, match="under strategy 'local' all operators run on trainers; plan again"):
        play(small_directory, {"name": "alone", "plan": given})


@pytest.mark.slow
def test_a_run_keeps_the_tagging_of_its_plan_when_it_is_resumed(small_directory, planned):
    other, taggings = swapped(planned), []
    assert [each for each in other.tagging.devices.values() if each != TRAINER]

    def look(trainer):
        taggings.append((trainer.plan.tagging, parts_of_servers(trainer)))

    steps = ["train.max_steps=2"]
    play(small_directory, grouped_scene("decided", overrides=steps), act=look)
    play(small_directory, grouped_scene("given", overrides=steps, plan=other), act=look)
    play(small_directory, grouped_scene("on", overrides=["train.max_steps=3"], load="given"), act=look)
    (_, decided), (given, there), (kept, still_there) = taggings
    assert given == kept == other.tagging
    assert there == still_there == decided[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (
            lambda d: {**d, "deep.9": TRAINER},
            "plan again with girih plan: tagging: 'deep.9' is not an operator of the model; did you mean",
        ),
        (lambda d: dict(list(d.items())[1:]), "on 'no device'; expected one of trainer, server 0, server 1"),
        (
            lambda d: dict.fromkeys(d, "server 2"),
            "on 'server 2'; expected one of trainer, server 0, server 1",
        ),
        (lambda d: dict.fromkeys(d, "server 1"), "on 'server 1'; it must stay on the trainer"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(small_directory, planned, change, reported):
    tagging = replace(planned.tagging, devices=change(planned.tagging.devices))
    with pytest.raises(ConfigError, match=reported) as error:
        play(small_directory, grouped_scene("refused", plan=replace(planned, tagging=tagging)))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_plan_of_a_model_with_other_layers_is_refused(small_directory, planned):
    cut = ("deep.linear", *planned.tagging.cut)
    given = replace(planned, tagging=replace(planned.tagging, cut=cut))
    with pytest.raises(ConfigError, match=r"layers: 'deep\.linear' is no fully"):
        play(small_directory, grouped_scene("layers", plan=given))


@pytest.mark.slow
def test_a_resumed_run_is_tagged_again_and_says_so_if_its_tagging_does_not_fit(
    small_directory, monkeypatch, caplog
):
    play(small_directory, grouped_scene("before", overrides=["train.max_steps=2"]))
    load, taggings = training_run.load, []

    def changed(place, schema):
        loaded = load(place, schema)
        tagging = {"devices": {"gone": TRAINER}, "cut": []}
        return replace(loaded, plan={**loaded.plan, "tagging": tagging})

    monkeypatch.setattr(training_run, "load", changed)
    goes_on = grouped_scene("anew", overrides=["train.max_steps=3"], load="before")
    play(small_directory, goes_on, act=lambda trainer: taggings.append(trainer.plan.tagging.devices))
    assert "gone" not in taggings[0]
    assert (
        "operators are tagged again: the earlier tagging of the run does not fit (tagging: 'gone' is"
        in caplog.text
    )


TOPK = ("servers_per_group=2", "split_fc=false", 'wire_dense_gradients="topk"')


@pytest.fixture(scope="module")
def with_state(directory):
    """A scene that goes on with a group of one trainer: its servers draw dropout masks, and most gradients are left for later."""
    common = {"strategy": "hierarchical", "options": TOPK}
    words = [FEW, "model.dropout=0.1"]
    play(directory, {**common, "name": "with-state", "overrides": [*words, "train.max_steps=3"]})
    return {**common, "load": "with-state", "overrides": [*words, "train.max_steps=6"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("local", {"strategy": "local", "options": []}),
        ("one-server", {"options": ["servers_per_group=1", *TOPK[1:]]}),
        ("without-topk", {"options": TOPK[:2]}),
    ],
)
def test_state_of_group_servers_is_dropped_under_other_options(directory, with_state, caplog, name, change):
    assert play(directory, {**with_state, **change, "name": f"dropped-{name}"})["steps"] == 6
    warnings = [message for message in caplog.messages if "top-k's unsent values are dropped" in message]
    assert len(warnings) == 1
    assert "step-00000003" in warnings[0]

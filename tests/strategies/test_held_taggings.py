"""Where operators run is decided once: ``girih plan`` writes it, a run under a plan and one that is resumed hold it."""

from dataclasses import replace

import pytest
from scenes import play, write

import girih.lifecycle.run as training_run
from girih.app.run_config import RunConfig
from girih.errors import ConfigError
from girih.planner.operators import TRAINER
from girih.planner.plan import Plan

pytestmark = pytest.mark.slow

SERVERS = 2
OPTIONS = [f"servers_per_group={SERVERS}", "split_fc=true"]
SWAPPED = {TRAINER: TRAINER, "server 0": "server 1", "server 1": "server 0"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("held"), num_examples=160, held_out=10)


@pytest.fixture(scope="module")
def planned(directory):
    return plan_of(directory, "deepfm", OPTIONS)


def plan_of(directory, config, options, strategy="hierarchical"):
    words = [f"strategy.{option}" for option in options]
    return RunConfig.load(directory / f"{config}.toml", overrides=words, strategy=strategy).planned()


def swapped(plan):
    """Another placement than any that would be decided."""
    devices = {name: SWAPPED[device] for name, device in plan.tagging.devices.items()}
    return replace(plan, tagging=replace(plan.tagging, devices=devices))


def scene(name, **more):
    return {"name": name, "strategy": "hierarchical", "options": OPTIONS, **more}


def held_by(trainer):
    """Operators that begin the parts of each server, as the servers tell them."""
    told = trainer.dense.processes()
    return [told[f"group-server {number}"]["parts"] for number in range(SERVERS)]


def test_a_plan_has_devices_and_layers_in_parts(planned):
    assert planned.tagging.cut
    parts = [f"{layer}.part_{number}" for layer in planned.tagging.cut for number in range(SERVERS)]
    assert {planned.tagging.devices[part] for part in parts} == {"server 0", "server 1"}
    assert Plan.from_dict(planned.to_dict()) == planned


def test_a_strategy_without_group_servers_plans_no_tagging(directory, planned):
    assert plan_of(directory, "deepfm", [], "local").tagging is None
    assert plan_of(directory, "deepfm", ["nets=2"]).tagging is None
    given = replace(plan_of(directory, "deepfm", [], "local"), tagging=planned.tagging)
    with pytest.raises(ConfigError, match="under strategy 'local' all operators run on trainers; plan again"):
        play(directory, {"name": "alone", "plan": given})


def test_a_run_holds_the_plan_and_one_that_goes_on_holds_its_own(directory, planned):
    other, found = swapped(planned), []
    assert [each for each in other.tagging.devices.values() if each != TRAINER]

    def look(trainer):
        found.append((trainer.plan.tagging, held_by(trainer)))

    steps = ["train.max_steps=2"]
    play(directory, scene("decided", overrides=steps), act=look)
    play(directory, scene("given", overrides=steps, plan=other), act=look)
    play(directory, scene("on", overrides=["train.max_steps=3"], load="given"), act=look)
    (_, decided), (given, there), (kept, still_there) = found
    assert given == kept == other.tagging
    assert there == still_there == decided[::-1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda d: {**d, "deep.9": TRAINER},
            "plan again with girih plan: tagging: 'deep.9' is no operator of the model; did you mean",
        ),
        (lambda d: dict(list(d.items())[1:]), "on 'no device'; expected one of trainer, server 0, server 1"),
        (
            lambda d: dict.fromkeys(d, "server 2"),
            "on 'server 2'; expected one of trainer, server 0, server 1",
        ),
        (lambda d: dict.fromkeys(d, "server 1"), "on 'server 1'; it has to stay on the trainer"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(directory, planned, change, told):
    tagging = replace(planned.tagging, devices=change(planned.tagging.devices))
    with pytest.raises(ConfigError, match=told) as error:
        play(directory, scene("refused", plan=replace(planned, tagging=tagging)))
    assert "\n" not in str(error.value)


def test_a_plan_of_a_model_with_other_layers_is_refused(directory, planned):
    cut = ("deep.linear", *planned.tagging.cut)
    given = replace(planned, tagging=replace(planned.tagging, cut=cut))
    with pytest.raises(ConfigError, match=r"layers: 'deep\.linear' is no fully"):
        play(directory, scene("layers", plan=given))


def test_a_run_whose_tagging_fits_no_more_is_tagged_anew_and_says_so(directory, monkeypatch, caplog):
    play(directory, scene("before", overrides=["train.max_steps=2"]))
    load, found = training_run.load, []

    def changed(place, schema):
        loaded = load(place, schema)
        tagging = {"devices": {"gone": TRAINER}, "cut": []}
        return replace(loaded, plan={**loaded.plan, "tagging": tagging})

    monkeypatch.setattr(training_run, "load", changed)
    goes_on = scene("anew", overrides=["train.max_steps=3"], load="before")
    play(directory, goes_on, act=lambda trainer: found.append(trainer.plan.tagging.devices))
    assert "gone" not in found[0]
    assert (
        "operators are tagged anew: the tagging of the run so far does not fit (tagging: 'gone' is"
        in caplog.text
    )

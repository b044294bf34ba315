"""A dense half among others that decides on the devices: two real processes, each beside a half that waits."""

from dataclasses import replace

from test_allreduced import Net, Spoiled, batch_of, embeddings_of, optimizer, parameters_of

from companions import together
from girih.data.batch import share_of
from girih.dense.half import DenseSpec
from girih.dense.halves.allreduced import AllReducedReplica
from support.votes import apply

SIZES = (6, 5, 1, 2)  # examples of each step: a share of the third is empty
SPOILED = {"gradient": Spoiled.apply, "loss": lambda mean: mean * float("nan")}


def computed_of(half, size, number):
    share = share_of(batch_of(size, number), half.ranks.rank, half.ranks.size)
    return half.compute(share, embeddings_of(share))


def launched(half, size, number, *, rows_refuse=False):
    """A step, whose outcome is on its way."""
    return apply(computed_of(half, size, number), rows_refuse=rows_refuse)


def refused(half, number, *, spoil=None, rows_refuse=False):
    """What is said of a step that one refuses, and of the one behind it; whether both move nothing."""
    before = parameters_of(half)
    half.module.spoil = spoil or half.module.spoil
    one = launched(half, 4, number, rows_refuse=rows_refuse)
    half.module.spoil = lambda mean: mean
    behind = launched(half, 4, number + 1)
    known = one.known() or behind.known()
    return [str(one.facts().refused), str(behind.facts().refused), parameters_of(half) == before, known]


def play(ranks):
    specs = [DenseSpec(module=Net(), optimizer=optimizer, clip_norm=0.3) for _ in range(2)]
    waiting, late = (
        AllReducedReplica(specs[0], ranks),
        AllReducedReplica(replace(specs[1], deferred=True), ranks),
    )
    alike = []

    def compare(size, number):
        waited = apply(computed_of(waiting, size, number)).facts()
        outcome = launched(late, size, number).facts()
        alike.append(
            outcome == waited and outcome.refused is None and parameters_of(late) == parameters_of(waiting)
        )

    for number, size in enumerate(SIZES):
        compare(size, number)
    last = ranks.rank == 1
    told = {name: refused(late, 10, spoil=spoiled if last else None) for name, spoiled in SPOILED.items()} | {
        "rows": refused(late, 10, rows_refuse=last)
    }
    compare(6, 9)  # and on they go
    if last:
        ranks.request_stop()
    outcome = launched(late, 4, 20)
    stopping = [ranks.stopping]
    outcome.facts()
    return alike, told, [*stopping, ranks.stopping]


def test_all_take_a_step_together_or_none_does_and_learn_it_a_step_late():
    behind = "a step before it was refused"
    for rank, (alike, told, stopping) in enumerate(together(play)):
        assert alike == [True] * (len(SIZES) + 1)
        assert told["gradient"] == [
            "the gradient of dense parameter 'all.weight' is NaN or infinite",
            behind,
            True,
            False,
        ]
        assert told["loss"] == [f"the loss{'' if rank else ' of trainer 1'} is nan", behind, True, False]
        assert told["rows"] == ["another trainer's loss or gradient is NaN or infinite", behind, True, False]
        assert stopping == [False, True]

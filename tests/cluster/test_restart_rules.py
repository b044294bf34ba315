"""Decisions on killed processes as a plain object, without processes."""

import pytest

from girih.cluster.roles import (
    FAIL,
    RELOAD_ALL,
    RESTART,
    FailurePolicy,
    RestartPolicy,
    RestartRules,
    RoleName,
)

SERVER, TRAINER = RoleName.EMBEDDING_SERVER, RoleName.TRAINER


def rules(policy=RESTART, max_restarts=2):
    made = RestartRules(max_restarts)
    made.policies[SERVER] = policy
    return made


def test_a_process_restarts_as_often_as_the_options_say():
    own = rules()
    assert own.why_ending(SERVER, 1, begun=True) == ""  # it was not by the options that it did not restart
    for deaths in range(3):
        assert own.may_restart(SERVER, 1, begun=True) == (deaths < 2)
        assert own.may_restart(SERVER, 0, begun=True)  # each process by itself
        own.deaths[SERVER, 1] += 1
    assert own.restarts == {SERVER: 3}
    assert "it had restarted 3 times, and cluster.max_restarts = 2" in own.why_ending(SERVER, 1, begun=True)


@pytest.mark.parametrize("policy", [FAIL, RELOAD_ALL, FailurePolicy(RestartPolicy.END_RUN, "set an option")])
def test_one_that_has_begun_restarts_only_by_its_policy_and_one_that_has_not_by_any(policy):
    own = rules(policy)
    assert not own.may_restart(SERVER, 0, begun=True)
    assert own.may_restart(SERVER, 0, begun=False)
    own.deaths[SERVER, 0] = 2
    assert not own.may_restart(SERVER, 0, begun=False)
    assert "has not begun is restarted at most cluster.max_restarts = 2" in own.why_ending(
        SERVER, 0, begun=False
    )


def test_a_role_without_a_policy_ends_the_run_for_no_reason_of_its_own():
    own = rules()
    assert not own.may_restart(TRAINER, 0, begun=True)
    assert own.why_ending(TRAINER, 0, begun=False) == ""
    assert "only under girih train" in rules(RELOAD_ALL).why_ending(SERVER, 0, begun=True)
    assert rules(FailurePolicy(why="set an option")).why_ending(SERVER, 0, begun=True) == "set an option"

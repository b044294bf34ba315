"""The store against a dictionary, over sequences of verbs that hypothesis invents."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from girih.kernels.cpu.jit import JIT_DISABLED
from store_machine import StoreMachine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_sequence_of_verbs_does_what_a_dictionary_does(dtype, small_index, tmp_path):
    class Machine(StoreMachine):
        directory = tmp_path
        dtypes = (dtype,)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=10 if JIT_DISABLED else 40 if dtype == "float32" else 12,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

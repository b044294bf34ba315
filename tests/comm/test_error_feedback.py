"""What top-k leaves out comes later, and nothing is lost or counted twice on the way."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from girih.comm.codecs.tensors import ErrorFeedback, TopK

HALF = TopK(0.3)
GRADIENTS = st.lists(
    hnp.arrays(np.float32, (2, 5), elements=st.floats(-(2.0**60), 2.0**60, width=32)), min_size=1, max_size=8
)
INTEGERS = st.lists(hnp.arrays(np.float32, 9, elements=st.integers(-100, 100)), min_size=1, max_size=20)


def sent(stream, gradients):
    return HALF.unpack(stream.pack(gradients), gradients.shape)


@settings(deadline=None, max_examples=60)
@given(GRADIENTS)
def test_each_step_sends_and_keeps_exactly_what_there_was(gradients):
    stream, left = ErrorFeedback(HALF), np.zeros(10, np.float32)
    for each in gradients:
        message = sent(stream, each).reshape(-1)
        stream.apply()
        total = left + each.reshape(-1)  # the one sum that rounds
        np.testing.assert_array_equal(message.astype(np.float64) + stream.left, total)
        assert (stream.left[message == 0] == total[message == 0]).all()
        left = stream.left.copy()


@settings(deadline=None, max_examples=60)
@given(INTEGERS)
def test_all_that_was_sent_and_the_rest_are_the_sum_of_gradients(gradients):
    stream = ErrorFeedback(HALF)
    messages = []
    for each in gradients:
        messages.append(sent(stream, each))
        stream.apply()
    np.testing.assert_array_equal(np.sum(messages, 0) + stream.left, np.sum(gradients, 0))


def test_a_small_gradient_is_sent_in_the_end():
    stream, gradients = ErrorFeedback(TopK(0.1)), np.ones(10, np.float32)
    gradients[3] = 0.25
    heard = np.zeros(10, np.float32)
    for _ in range(100):
        heard += TopK(0.1).unpack(stream.pack(gradients), (10,))
        stream.apply()
    assert heard[3] > 0
    assert abs(heard - 100 * gradients).max() <= 10  # never further behind than the longest wait


@settings(deadline=None, max_examples=60)
@given(GRADIENTS, hnp.arrays(np.float32, 10, elements=st.floats(width=32)))
def test_a_discarded_step_leaves_nothing_behind(gradients, refused):
    one, other = ErrorFeedback(HALF), ErrorFeedback(HALF)
    for each in gradients:
        one.pack(refused)
        one.discard()
        np.testing.assert_array_equal(sent(one, each), sent(other, each))
        one.apply()
        other.apply()
    np.testing.assert_array_equal(one.left, other.left)
    assert np.isfinite(one.left).all()


def test_micro_batches_of_a_step_build_on_each_other_and_go_together():
    stream = ErrorFeedback(TopK(0.5))
    stream.pack(np.array([4, 3, 2, 1], np.float32))
    second = TopK(0.5).unpack(stream.pack(np.array([0, 0, 2, 1], np.float32)), (4,))
    np.testing.assert_array_equal(second, [0, 0, 4, 2])
    stream.discard()
    np.testing.assert_array_equal(stream.left, [])
    stream.discard()  # there is no step
    stream.apply()
    np.testing.assert_array_equal(stream.left, [])


def test_a_shorter_message_leaves_the_rest_waiting():
    stream = ErrorFeedback(TopK(0.5))
    stream.pack(np.array([[8, 1], [2, 3]], np.float32))
    stream.apply()
    np.testing.assert_array_equal(stream.left, [0, 1, 2, 0])
    message = TopK(0.5).unpack(stream.pack(np.array([[0, 1]], np.float32)), (1, 2))
    stream.apply()
    np.testing.assert_array_equal(message, [[0, 2]])
    np.testing.assert_array_equal(stream.left, [0, 0, 2, 0])
    longer = TopK(0.5).unpack(stream.pack(np.full(6, 1, np.float32)), (6,))
    np.testing.assert_array_equal(longer, [1, 1, 3, 0, 0, 0])

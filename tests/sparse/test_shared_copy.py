"""Groups share one copy of a batch, and a batch that is read again is copied again."""

from girih.sparse.groups.gpu_batch import SharedCopy
from support import cases


def test_groups_share_a_copy_until_one_reads_again():
    batch, copies, shared = cases.batches()[0], [], SharedCopy()

    def copy(batch):
        copies.append(object())
        return copies[-1]

    assert shared.of(batch, "one", copy) is shared.of(batch, "two", copy)
    assert len(copies) == 1
    assert shared.of(batch, "one", copy) is copies[1]  # its arrays may have changed since
    assert shared.of(batch, "two", copy) is copies[1]

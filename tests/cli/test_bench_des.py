"""The cost model against Table 2 of the DES paper, all fifteen cells."""

import pytest

PROJECTION = 600 * 8 * 256 * 4  # 600 fields of 8 numbers into 256 outputs: 4.9 MB
TABLE_2 = [
    (512, 147_664, 99.769, 99.376, 90.310),
    (1024, 257_757, 99.735, 99.285, 86.226),
    (2048, 448_814, 99.696, 99.179, 81.658),
    (4096, 789_511, 99.654, 99.066, 77.015),
    (8192, 1_389_353, 99.607, 98.939, 72.264),
]


@pytest.fixture
def saving(folder):
    import des_savings

    return des_savings.saving


@pytest.mark.parametrize(("batch", "keys", "lr", "fm", "dnn"), TABLE_2)
def test_table_2(saving, batch, keys, lr, fm, dnn):
    found = (
        saving(batch, keys, width=1, columns=1),
        saving(batch, keys, width=8, columns=8 + 1),
        saving(batch, keys, width=8, columns=256, projection_bytes=PROJECTION),
    )
    for ours, theirs in zip(found, (lr, fm, dnn), strict=True):
        assert round(100 * ours, 3) == pytest.approx(theirs, abs=1.1e-3)


def test_what_is_saved_does_not_depend_on_the_number_of_workers(saving):
    for workers in (2, 4, 64):
        assert saving(512, 147_664, width=8, columns=9, num_workers=workers) == pytest.approx(
            0.99376, abs=1e-5
        )

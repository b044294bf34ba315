"""The names of girih's own models, for processes without torch; see :data:`girih.models.zoo.BY_NAME`."""

NAMES = (
    "lr", "fm", "wide_deep", "deepfm", "dnn", "dlrm", "dcn", "dcnv2", "xdeepfm", "din", "dien", "dsin", "atbrg", "can", "mmoe",
    "esmm", "star", "two_tower", "retrieval",
)  # fmt: skip

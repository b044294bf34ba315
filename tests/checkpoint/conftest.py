"""Places where checkpoints can lie: a directory, memory, and a real S3 server on this machine."""

import uuid

import pytest

PLACES = ["directory", "memory", "s3"]


@pytest.fixture(params=PLACES)
def address(request, tmp_path):
    """Where checkpoints may be written; empty."""
    if request.param == "s3":
        return request.getfixturevalue("s3_address")
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "place")

"""Dense halves on GPUs with rows in embedding servers."""

import pytest
import torch

from girih.app.run_config import RunConfig
from girih.sparse.halves.staging import Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def losses(log_directory, *overrides):
    settings = RunConfig.load(
        log_directory / "config.toml", overrides=("model.dropout=0", "train.epochs=2", *overrides)
    )
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        assert isinstance(trainer.sparse.staging, Staging) == ("train.device=cuda" in overrides)
        return trainer.evaluate(settings.dataset("valid")).logloss


@pytest.mark.parametrize("name", ["hybrid", "asynchronous"])
@pytest.mark.parametrize("staleness", [0, 4])
def test_a_run_on_a_gpu_is_that_on_a_cpu(log_directory, name, staleness):
    chosen = (f"strategy.name={name}", f"strategy.staleness={staleness}")
    there, here = (losses(log_directory, *chosen, f"train.device={device}") for device in ("cuda", "cpu"))
    assert there == pytest.approx(here, rel=1e-2 if staleness else 1e-4)

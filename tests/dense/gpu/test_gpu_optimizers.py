"""Dense optimizers on a GPU move parameters as they do on a CPU."""

import pytest
import torch
from torch.nn import Parameter

from girih.dense.options import OPTIMIZERS, optimizer_factory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_parameters_as_on_a_cpu(name):
    moved = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        parameters = [Parameter(torch.randn(5, 3).to(device)), Parameter(torch.randn(3).to(device))]
        optimizer = optimizer_factory({"name": name, "lr": 0.01})(parameters)
        for _ in range(20):
            for parameter in parameters:
                parameter.grad = 2 * (parameter.detach() - 1)
            optimizer.step()
        moved.append([parameter.detach().cpu() for parameter in parameters])
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-5, atol=1e-6)

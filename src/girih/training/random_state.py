"""Random state of every trainer, so that a resumed run draws the same masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from girih.comm.group import TrainerGroup


def gather(
    ranks: TrainerGroup, device: torch.device, extra: Mapping[str, Tensor] | None = None
) -> list[dict[str, Tensor]]:
    """State of each trainer's generators by rank, on rank 0; this trainer's alone on the others.

    Args:
        extra: this trainer's, see :class:`girih.training.session.Stateful`.
    """
    local = {"cpu": torch.get_rng_state().numpy()}
    local |= {name: tensor.numpy() for name, tensor in (extra or {}).items()}
    if device.type == "cuda":
        local["cuda"] = torch.cuda.get_rng_state(device).numpy()
    gathered = ranks.gather_arrays(local) or [local]
    return [{name: torch.from_numpy(array) for name, array in each.items()} for each in gathered]


def extra_state(states: Sequence[Mapping[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """Returns the ``extra`` that the trainer with a rank gave to :func:`gather`."""
    return {} if rank >= len(states) else {name: value for name, value in states[rank].items() if "/" in name}


def check(states: Sequence[Mapping[str, Tensor]]) -> None:
    """Raises what torch does where :func:`restore` would meet no state of a generator."""
    for state in (states[0], *states[1:]):
        torch.Generator().set_state(state["cpu"])


def restore(
    states: Sequence[Mapping[str, Tensor]],
    rank: int,
    *,
    alike: bool,
    were_alike: bool,
    device: torch.device | None = None,
) -> None:
    """Puts this trainer's state back.

    Args:
        device: that of the dense half, whose generator has its own state where it is a GPU.
        alike: whether all trainers draw the same masks; all then take the state that rank 0 had.
        were_alike: the same of the run that was saved. A trainer that was not there, or drew as rank 0 did, keeps the
            state that it begins a run with.
    """
    if alike:
        rank = 0
    elif rank and (were_alike or rank >= len(states)):
        return
    torch.set_rng_state(states[rank]["cpu"])
    if "cuda" in states[rank] and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states[rank]["cuda"], device)

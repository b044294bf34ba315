"""Trainers of tests with rows in GPU memory, however few GPUs there are.

NCCL connects trainers that have a GPU each. Where there are fewer, they share the first one, and what they exchange goes over gloo, by
way of the host's memory: all is tested then but NCCL.
"""

import torch

from girih.comm.group import TrainerGroup


class ThroughHost(TrainerGroup):
    """Exchanges what lies on a GPU by way of the host's memory."""

    def begin_exchange(self, sent, sent_sizes, received_sizes):
        """See :class:`TrainerGroup`."""
        if sent.device.type == "cpu":
            return super().begin_exchange(sent, sent_sizes, received_sizes)
        end = super().begin_exchange(sent.cpu(), sent_sizes, received_sizes)
        return lambda: end().to(sent.device)

    def all_reduce(self, tensor, *, async_op=False):
        """See :class:`TrainerGroup`."""
        if tensor.device.type == "cpu":
            return super().all_reduce(tensor, async_op=async_op)
        on_host = tensor.cpu()
        super().all_reduce(on_host)
        tensor.copy_(on_host)
        return None


def share_a_gpu(size):
    """Whether there are GPUs, and fewer than trainers."""
    return 0 < torch.cuda.device_count() < size


def kind_of(size):
    """The class of a trainer's group."""
    return ThroughHost if share_a_gpu(size) else TrainerGroup


def gpu_of(ranks):
    """The number of a trainer's GPU; None takes the first, or none where kernels are interpreted."""
    return ranks.rank if torch.cuda.device_count() >= ranks.size else None

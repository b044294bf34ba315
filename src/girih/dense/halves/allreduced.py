"""The dense half of one of several trainers. Each step updates all replicas by the sum of their gradients.

This is Persia's Algorithm 2. Instead of the paper's locks, it uses an AllReduce in buckets, which runs during the
backward pass (§4.2.3).
"""

from __future__ import annotations

import itertools
import time
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import gathered_rows
from girih.data.batch import Batch
from girih.dense.batch_norm import GlobalBatchNorm
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica, ReplicaComputed, begin_as_first, to_device
from girih.errors import ConfigError
from girih.models.embeddings import Embeddings, Jagged
from girih.models.loss import Targets
from girih.planner.costs import BUCKET_BYTES
from girih.telemetry.busy import waiting

_SELDOM = 1 << 30


class SynchronousReplica(Replica):
    """One of several copies of the dense parameters, which all start with the values of rank 0."""

    def __init__(self, spec: DenseSpec, ranks: TrainerGroup) -> None:
        super().__init__(spec)
        self.ranks = ranks
        if self.device.type == "cuda" and ranks.size > 1:
            _refuse_shared_gpus(ranks, self.device)
        begin_as_first(self.module, ranks)

    def _normalizing(self, *, counted: bool) -> AbstractContextManager[object]:
        """Returns the context of batch norm for a training forward pass in which each trainer has different examples.

        ``counted`` is True if this trainer's examples count.
        """
        if not self._spec.global_batch_norm or self.ranks.size == 1:
            return nullcontext()
        return GlobalBatchNorm(self.ranks, self.stats_of_process, counted=counted)

    def _backward(self, outputs: Tensor, mean: Tensor | None, share: float) -> None:
        """See :class:`Replica`. Takes part in the communication even if this trainer has no loss."""
        if mean is None and outputs.requires_grad and self.ranks.size > 1:
            outputs.backward(torch.zeros_like(outputs))  # type: ignore[no-untyped-call]
        super()._backward(outputs, mean, share)


def _refuse_shared_gpus(ranks: TrainerGroup, device: torch.device) -> None:
    """Raises an error if two trainers use the same GPU, because NCCL cannot connect them.

    Raises:
        ConfigError: two trainers would share a GPU. All trainers raise it.
    """
    local_uuid = str(torch.cuda.get_device_properties(device).uuid)
    of_ranks = ranks.broadcast(ranks.gather(local_uuid))
    for rank, uuid in enumerate(of_ranks):
        if uuid in of_ranks[:rank]:
            raise ConfigError(
                f"train: device = 'cuda': trainers {of_ranks.index(uuid)} and {rank} would share a GPU; expected one each: set"
                f" strategy.trainers = {len(set(of_ranks))}, or train.device = 'cpu'"
            )


class AllReducedReplica(SynchronousReplica):
    """One of several equal copies of the dense parameters.

    Gradients are summed and not averaged, because each trainer computes gradients of its part of the step's mean loss.
    By default, batch norm uses the examples of each trainer alone, and checkpoints keep the running moments of rank 0.
    The specification can ask for global batch norm instead.
    """

    _parallel: DistributedDataParallel | None = None
    _passing: ExitStack | None = None
    """The contexts that close at the end of the current backward pass."""

    def __init__(self, spec: DenseSpec, ranks: TrainerGroup) -> None:
        super().__init__(spec, ranks)
        self.voters = ranks if ranks.size > 1 else None

    def compute(
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: ReplicaComputed | None = None,
        *,
        last: bool = True,
    ) -> ReplicaComputed:
        """See :class:`Replica`. The first call finds the parameters on which the loss depends.

        This trainer first sums the gradients of all micro-batches. Then all trainers sum them once.
        """
        if self._parallel is None and self.ranks.size > 1 and self.parameters:
            self._parallel = self._distributed(*_one_example(batch, embeddings))
        with nullcontext() if last or self._parallel is None else self._parallel.no_sync():
            return super().compute(batch, embeddings, onto, last=last)

    def _outputs(self, batch: Batch, embeddings: Embeddings, *, train: bool) -> Tensor:
        """Returns the model's outputs. A trainer with an empty share takes part with an example that does not count."""
        has_examples = batch.num_examples > 0
        with self._normalizing(counted=has_examples) if train else nullcontext():
            if has_examples:
                return super()._outputs(batch, embeddings, train=train)
            return super()._outputs(*_one_example(batch, embeddings), train=train)[:0]

    def _backward(self, outputs: Tensor, mean: Tensor | None, share: float) -> None:
        """See :class:`Replica`. At the end, this trainer waits for the gradients of all trainers."""
        with ExitStack() as self._passing:
            super()._backward(outputs, mean, share)
        self._passing = None

    def _over_batch(self, targets: Targets, batch: Batch) -> Targets:
        """See :class:`Replica`. Adds the function that gathers the rows of all trainers."""
        targets = super()._over_batch(targets, batch)
        if self.ranks.size == 1 or batch.share is None:
            return targets
        size, num_trainers = batch.share.num_examples, self.ranks.size
        bounds = [
            rank * size // num_trainers for rank in range(num_trainers + 1)
        ]  # the same bounds as in share_of
        sizes = [end - start for start, end in itertools.pairwise(bounds)]

        def gather(rows: Tensor) -> Tensor:
            self.stats_of_process.sent("dense", (num_trainers - 1) * rows.numel() * rows.element_size())
            return gathered_rows(rows, self.ranks, sizes)

        return targets._replace(first=bounds[self.ranks.rank], gather=gather)

    def close(self) -> None:
        """Releases the references to the group of trainers."""
        self._parallel = None

    def _module(self, *, train: bool) -> nn.Module:
        parallel = self._parallel if train else None
        return super()._module(train=train) if parallel is None else parallel

    def _distributed(self, batch: Batch, embeddings: Embeddings) -> DistributedDataParallel:
        unused = self.ranks.any(self._leaves_some_aside(batch, embeddings))
        with warnings.catch_warnings():
            # The successor of this deprecated option behaves differently.
            warnings.simplefilter("ignore", FutureWarning)
            parallel = DistributedDataParallel(
                super()._module(train=True),
                process_group=self.ranks.process_group,
                broadcast_buffers=False,
                bucket_cap_mb=BUCKET_BYTES / (1 << 20),
                find_unused_parameters=unused,
                init_sync=False,
            )
        if self.deferred:  # DDP waits for the GPU when it measures a step
            parallel._set_ddp_runtime_logging_sample_rate(_SELDOM)  # type: ignore[no-untyped-call]
        self._order_buckets(parallel, batch, embeddings)
        # A lambda, because DDP checks annotated types of arguments, which are unknown at run time.
        parallel.register_comm_hook(None, lambda state, bucket: self._sum(bucket))
        return parallel

    def _order_buckets(self, parallel: DistributedDataParallel, batch: Batch, embeddings: Embeddings) -> None:
        """Makes DDP order its buckets in this call. DDP orders them once, after the first backward pass.

        The order of buckets decides the order of summation. A resumed run must sum in the same order as an
        uninterrupted run.
        """
        self._set_mode(False)
        self._parallel = parallel
        self._outputs(batch, embeddings, train=True).sum().backward()  # type: ignore[no-untyped-call]
        self._set_mode(True)
        for parameter in self.parameters:
            parameter.grad = None

    def _leaves_some_aside(self, batch: Batch, embeddings: Embeddings) -> bool:
        """Returns whether the logits do not depend on all parameters. Tries it with one example."""
        self._set_mode(False)  # evaluation changes no running mean and draws no random number
        numeric = torch.from_numpy(batch.numeric).to(self.device)
        logits = self._logits_of(numeric, to_device(embeddings, self.device), train=False)
        self._set_mode(True)
        gradients = torch.autograd.grad(logits.sum(), self.parameters, allow_unused=True)
        return any(gradient is None for gradient in gradients)

    def _sum(self, bucket: torch._C._distributed_c10d.GradBucket) -> object:
        start, buffer = time.perf_counter(), bucket.buffer()
        # A ring sends each part to the next rank twice: once to sum the part, and once to share the sum.
        stats, size = self.stats_of_process, self.ranks.size
        stats.sent("dense", 2 * (size - 1) * buffer.numel() * buffer.element_size() // size)
        work = self.ranks.all_reduce(buffer, async_op=True)
        if bucket.is_last() and self._passing is not None:
            # This runs after the remaining computation, and before DDP's own callback, which waits for all buckets.
            begin = partial(self._passing.enter_context, waiting())
            torch.autograd.Variable._execution_engine.queue_callback(begin)

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            stats.spans.add("allreduce", time.perf_counter() - start, start)
            return future.value()[0]

        return work.get_future().then(done)


def _one_example(batch: Batch, embeddings: Embeddings) -> tuple[Batch, Embeddings]:
    """Returns a batch of one example with zero embeddings and without ids."""
    numeric, labels = (np.zeros((1, array.shape[1]), np.float32) for array in (batch.numeric, batch.labels))
    return replace(batch, numeric=numeric, labels=labels), embeddings.mapped(
        lambda bags: bags.new_zeros(1, *bags.shape[1:]),
        lambda each: Jagged(each.values.new_zeros(0, each.values.shape[1]), each.offsets.new_zeros(2)),
    )

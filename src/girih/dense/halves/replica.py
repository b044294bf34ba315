"""The dense half of one process: a model with its own parameters and optimizer.

Shapes: B examples, T labels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from girih.checkpoint.save import DenseState
from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import BALLOT, LOSS, STOPS, Numbers, Vote, largest_of
from girih.config.user_code import blame
from girih.data.batch import Batch, label_scale
from girih.dense.accel.compiled import CompiledModel
from girih.dense.accel.process_settings import keep_freed_memory
from girih.dense.half import DenseSpec, Outcome, ScoredSteps, StepFacts
from girih.dense.halves.deferred import Buffers, Gradients, move_masked, take_step_masked
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError, GirihError, NonFiniteError, kind_of
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.loss import Targets, is_over_batch, loss_of
from girih.telemetry.stats import StatsSnapshot


@dataclass(eq=False)
class ReplicaComputed:
    """Loss and gradients of one batch, or of several micro-batches.

    Attributes:
        buffers: the model's buffers before the batch.
        largest: float32[P], on the device: the largest absolute value of each gradient.
        embeddings: the embeddings of each micro-batch.
        refusal: why the step is refused, if the host knows a reason that the loss and ``largest`` do not show.
    """

    half: Replica
    vote: Vote
    gradients: Gradients
    buffers: Buffers
    largest: Tensor
    embeddings: Sequence[Embeddings]
    refusal: NonFiniteError | None = None

    def add(self, batch: Batch, embeddings: Embeddings, *, last: bool) -> ReplicaComputed:
        """See :class:`girih.dense.half.Computed`."""
        return self.half.compute(batch, embeddings, self, last=last)

    def apply(self, vote: Vote) -> Outcome:
        """Takes one optimizer step, unless the vote refuses it.

        Raises:
            LookupError: there is no vote.
        """
        if vote.ballots is None:
            raise LookupError("a step that nobody has voted on")
        numbers = [vote.ballots.reshape(-1), vote.reported]
        names: Sequence[str] = ()
        if vote.deferred or vote.known_refused:
            names = self.names()
            numbers.append(self._local_numbers(vote))
        put_back = self.half.take_step(vote, self.gradients, self.buffers)
        self.gradients, self.buffers = [], []
        if not vote.deferred:
            return Outcome(self._facts(vote, names, put_back, *map(Tensor.tolist, numbers)))
        sizes = list(map(len, numbers))

        def read(flat: Numbers) -> StepFacts:
            return self._facts(
                vote,
                names,
                put_back,
                *map(np.ndarray.tolist, np.split(np.array(flat), np.cumsum(sizes)[:-1])),
            )

        flat = torch.cat([each.double().to(self.half.device) for each in numbers])
        return Outcome(None, flat, read, together=len(vote.ballots) > 1)

    def names(self) -> list[str]:
        """The names of the parameters whose gradients are not empty."""
        named = zip(self.half.named_parameters, self.gradients, strict=True)
        return [name for (name, _), each in named if each is not None and each.numel()]

    def explain(self, names: Sequence[str], numbers: Numbers, losses: Numbers = ()) -> NonFiniteError | None:
        """Returns the reason why the dense half refuses the step, or None.

        Args:
            names: the names of the gradients.
            numbers: this trainer's numbers, in the order of :meth:`_local_numbers`.
            losses: the losses of all trainers.
        """
        loss, stopped, _, *largest = numbers
        if stopped:
            return NonFiniteError("a step before it was refused")
        if not math.isfinite(loss):
            features = (part.first_nonfinite() for part in self.embeddings)
            feature = next((each for each in features if each), None)
            named = f", and so is feature {feature!r}" if feature else ""
            return NonFiniteError(f"the loss is {loss}{named}")
        if self.refusal is not None:
            return self.refusal
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                return NonFiniteError(f"the loss of trainer {rank} is {value}")
        for name, value in zip(names, largest, strict=True):
            if not math.isfinite(value):
                return NonFiniteError(f"the gradient of dense parameter {name!r} is NaN or infinite")
        return None

    def _local_numbers(self, vote: Vote) -> Tensor:
        """float64[3 + P]: the loss, whether an earlier step or this step was refused (two numbers), the maxima."""
        flags = (self.half.stopped, vote.refused)
        return torch.cat(
            [self.vote.loss.reshape(1), *(each.reshape(1).double() for each in flags), self.largest.double()]
        )

    def _facts(
        self,
        vote: Vote,
        names: Sequence[str],
        put_back: Callable[[], None],
        votes: Numbers,
        of_rows: Numbers,
        local: Numbers = (),
    ) -> StepFacts:
        """The outcome of the step, from numbers on the host. ``local`` is present if the step may have been refused."""
        losses, refusal = votes, None
        if vote.ranks is not None:
            losses = votes[LOSS :: len(BALLOT)]
            vote.ranks.note_stops(sum(votes[STOPS :: len(BALLOT)]))
        if local and local[2]:
            refusal = (
                self.explain(names, local, losses)
                or vote.error_from(of_rows)
                or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
            )
            put_back()
            vote.rollback()
        return StepFacts(sum(losses), refusal, vote.counters_from(of_rows))


class Replica:
    """One copy of the dense parameters.

    Attributes:
        optimizer: moves the parameters; None if there are no parameters.
        stopped: 0-d bool, on the device: a step was refused, and the host does not know it yet.
        begun: parameters for which the optimizer has created state.
        voters: the trainers that vote on a step; None if this trainer decides alone.
    """

    voters: TrainerGroup | None = None

    def __init__(self, spec: DenseSpec) -> None:
        self._spec, self.device, self.stats_of_process = spec, spec.device, spec.stats
        if self.device.type == "cpu":
            keep_freed_memory()
        self.module = spec.module.to(self.device)
        self._kind: type[nn.Module] = type(spec.module)  # the class that errors name
        self.named_parameters = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named_parameters]
        self.optimizer = made_by(spec.optimizer, self.parameters)
        self.deferred, self.stopped = spec.deferred, torch.zeros((), dtype=torch.bool, device=self.device)
        self.begun: set[nn.Parameter] = set()  # parameters for which the optimizer has created state
        self._compiled: CompiledModel | None = None
        if spec.compile:
            self._compiled = CompiledModel(self.module, replays=self.device.type == "cuda")
        self._loss = loss_of(self.module)
        self._to_logits: Callable[[Tensor], Tensor] | None = getattr(self.module, "logits", None)
        self._loss_features = _places(self.module)
        # each trainer computes its part of a loss over the whole batch, and all trainers must take part
        self.whole_batch = is_over_batch(self.module)
        self._modes: list[tuple[nn.Module, bool]] = []

    def compute(
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: ReplicaComputed | None = None,
        *,
        last: bool = True,
    ) -> ReplicaComputed:
        """Runs the forward pass, the loss and the backward pass, and adds up the gradients of all micro-batches."""
        buffers = self._begin_step(onto)
        with self._phase("forward"):
            outputs = self._outputs(batch, embeddings, train=True)
            targets, share = self._targets(batch)
            if self._spec.scored is not None:
                self._score(self._spec.scored, outputs, targets)
            mean = self._mean_loss(outputs, targets)
        with self._phase("backward"):
            none = outputs.new_zeros((), dtype=torch.float64)
            loss = none if mean is None else mean.detach().double() * share
            refused = ~torch.isfinite(loss)
            # if other trainers wait for gradients of this trainer's loss, they get the non-finite gradients
            drops = not (self.deferred or self.whole_batch) and bool(refused)
            self._backward(outputs, None if drops else mean, share)
            refusal, gradients = self._refusal(embeddings), self._taken_gradients()
            all_embeddings = [embeddings]
            if onto is None:
                refused = refused | self.stopped
            else:
                loss, refused = onto.vote.loss + loss, onto.vote.refused | refused
                refusal, all_embeddings = onto.refusal or refusal, [*onto.embeddings, embeddings]
            largest = loss.new_empty(0)
            if last:
                present = [each for each in gradients if each is not None and each.numel()]
                largest = largest_of(present, self.device)
                refused = refused | ~torch.isfinite(largest).all()
            if refusal is not None:
                refused = torch.ones_like(refused)
            vote = Vote(refused, loss, self.deferred, self.voters)
        return ReplicaComputed(self, vote, gradients, buffers, largest, all_embeddings, refusal)

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Returns logits, float32[B, T]."""
        return self.logits(self.outputs(batch, embeddings))

    def outputs(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Returns the model's outputs, float32[B, ...]: logits unless the model has a method ``logits(outputs)``."""
        self._set_mode(False)
        return self._outputs(batch, embeddings, train=False).detach()

    def logits(self, outputs: Tensor) -> Tensor:
        """Returns logits, float32[B, T], from the model's outputs."""
        return outputs if self._to_logits is None else self._to_logits(outputs)

    def take_step(self, vote: Vote, gradients: Gradients, buffers: Buffers) -> Callable[[], None]:
        """Takes one optimizer step. If the vote refuses the step, nothing moves and the buffers are restored.

        Returns:
            A function that the host must call if it learns that the step was refused.
        """
        if vote.deferred:
            return take_step_masked(self, vote.refused, gradients, buffers)
        if vote.refused:
            for buffer, before in buffers:
                buffer.copy_(before)
        else:
            self.move(gradients)
        return lambda: None

    def move_masked(self, refused: Tensor, gradients: Gradients) -> Callable[[], None]:
        """See :func:`girih.dense.halves.deferred.move_masked`: the same as :meth:`move`, unless the flag is set."""
        return move_masked(self, refused, gradients)

    def move(self, gradients: Gradients) -> None:
        """Takes one optimizer step, after clipping."""
        if self.optimizer is None:
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._spec.clip_norm is not None:
            self._clip(self._spec.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def sync(self) -> None:
        """No-op: nothing is in flight, and only this trainer moves the parameters."""

    def stats(self) -> dict[str, int]:
        """A staleness of 0: the parameters are never stale."""
        return {"staleness_max": 0}

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Empty: this process is the only one."""
        return {}

    def close(self) -> None:
        """No-op: a replica only holds memory."""

    def state(self) -> DenseState:
        """``model`` and ``optimizer`` state dicts, and the optimizer's name."""
        return {
            "model": self.module.state_dict(),
            "optimizer": {} if self.optimizer is None else self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
        }

    def restore(self, state: DenseState) -> None:
        """The inverse of :meth:`state`. The optimizer keeps its current options.

        Raises:
            ValueError: the state belongs to another optimizer.
            RuntimeError: the state belongs to another model.
        """
        saved_name, expected = state["optimizer_name"], type(self.optimizer).__name__
        if saved_name != expected:
            raise ValueError(f"its dense optimizer is {saved_name}, the configuration's is {expected}")
        self.module.load_state_dict(state["model"])
        if self.optimizer is not None and state["optimizer"]:
            now = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            saved = state["optimizer"]
            groups = saved["param_groups"]
            if len(groups) == len(now):
                # while loading, torch uses these options to decide whether updates are counted on the device
                kinds = [{k: own[k] for k in ("fused", "capturable") if k in own} for own in now]
                groups = [group | kind for group, kind in zip(groups, kinds, strict=True)]
            self.optimizer.load_state_dict({**saved, "param_groups": groups})
            for group, options in zip(self.optimizer.param_groups, now, strict=True):
                group.update(options)

    def _begin_step(self, onto: ReplicaComputed | None) -> Buffers:
        """Gives parameters the gradients of earlier micro-batches. Returns copies of the buffers before the batch."""
        self._set_mode(True)
        earlier: Gradients = [None] * len(self.parameters) if onto is None else onto.gradients
        for parameter, gradient in zip(self.parameters, earlier, strict=True):
            parameter.grad = gradient  # drops a gradient that a failed step or the user's own loop left
        if onto is None:  # a refused step must not move running means either
            return [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        return onto.buffers

    def _outputs(self, batch: Batch, embeddings: Embeddings, *, train: bool) -> Tensor:
        """Returns the model's outputs, checked: float32[B, T] if they are logits."""
        numeric = moved(batch.numeric, self.device)
        # a compiled model has its own matrix products
        has_products = train and self._compiled is not None and self._spec.precision == "float32"
        arithmetic = nullcontext() if has_products else self._spec.arithmetic()
        with torch.set_grad_enabled(train), arithmetic:
            logits = self._logits_of(numeric, to_device(embeddings, self.device), train=train)
        rows = self._num_outputs(batch.num_examples, train=train)
        labels = batch.labels.shape[1]  # without labels, the number of columns is unknown
        if (
            logits.dim() != 2
            or len(logits) != rows
            or (labels not in (0, logits.shape[1]) and self._to_logits is None)
        ):
            raise ConfigError(
                f"{self._kind.__name__}.forward returned logits of shape {list(logits.shape)}; "
                f"expected {[rows, labels or 1]}: a row per example, a column per label"
            )
        return logits.float()

    def _num_outputs(self, num_examples: int, *, train: bool) -> int:
        """The number of examples whose logits this trainer computes."""
        return num_examples

    def _targets(self, batch: Batch) -> tuple[Targets, float]:
        """The targets to compare the logits with, and the weight of their mean loss in the loss of the step."""
        scale, of_labels, weights = label_scale(batch), batch.label_weights, batch.example_weights
        targets = Targets(
            moved(batch.labels, self.device),
            None if weights is None else moved(weights, self.device),
            None if of_labels is None else moved(of_labels, self.device),
            None if scale is None else moved(scale, self.device),
            self._spec.losses,
            self._spec.huber_delta,
        )
        if self.whole_batch:
            return self._over_batch(targets, batch), 1.0
        return targets, 1.0 if batch.share is None else batch.share.weight

    def _over_batch(self, targets: Targets, batch: Batch) -> Targets:
        """The targets for a loss over the whole batch, with the ids that it reads."""
        ids = {name: batch.first_ids(place) for name, place in self._loss_features.items()}
        return targets._replace(
            ids={name: torch.from_numpy(each).to(self.device) for name, each in ids.items()}
        )

    def _score(self, scored: ScoredSteps, outputs: Tensor, targets: Targets) -> None:
        """Counts the logits of a step."""
        scored.add(self.logits(outputs.detach()), targets)

    def _mean_loss(self, outputs: Tensor, targets: Targets) -> Tensor | None:
        """The mean loss, 0-d, checked. None without examples, unless all trainers take part in the loss."""
        if not (len(outputs) or self.whole_batch):
            return None
        mean = self._loss(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim() != 0:
            got = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            raise ConfigError(
                f"{self._kind.__name__}.loss returned {got}; expected the mean loss, a 0-d tensor"
            )
        return mean

    def _backward(self, outputs: Tensor, mean: Tensor | None, share: float) -> None:
        """Computes gradients of ``share`` times the mean loss, which is None if refused or without examples."""
        if mean is not None and mean.requires_grad:
            mean.backward(torch.full_like(mean, share))  # type: ignore[no-untyped-call]

    def _refusal(self, embeddings: Embeddings) -> NonFiniteError | None:
        """Returns a reason to refuse the step that the loss and the gradients do not show. Called for every step."""
        return None

    def _taken_gradients(self) -> Gradients:
        """Takes the parameters' gradients. From now on they belong to the handle."""
        gradients: Gradients = []
        for parameter in self.parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients if self._compiled is None else self._compiled.kept(gradients)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Times a part of a training step."""
        spans = self.stats_of_process.spans
        return spans(name) if self._compiled is None else self._compiled.phase(name, spans)

    def _module(self, *, train: bool) -> nn.Module:
        """The model, as this half computes it."""
        return self._compiled if train and self._compiled is not None else self.module

    def _logits_of(self, numeric: Tensor, embeddings: Embeddings, *, train: bool) -> Tensor:
        kind = self._kind
        try:
            logits = self._module(train=train)(numeric, embeddings)
        except GirihError:
            raise
        except Exception as error:
            if kind.__module__.startswith("girih."):
                raise
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            raise ConfigError(f"{kind.__name__}.forward failed: {blame(error, file)}") from error
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"{kind.__name__}.forward returned {kind_of(logits)}; expected logits, "
                "a tensor of a row per example and a column per label"
            )
        return logits

    def _set_mode(self, train: bool) -> None:
        """Sets all modules to evaluation, or sets each module back to the user's choice for training."""
        if not train and not self._modes:
            self._modes = [(module, module.training) for module in self.module.modules()]
            self.module.eval()
        elif train and self._modes:
            for module, training in self._modes:
                module.training = training
            self._modes = []

    def _clip(self, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, most)


def _places(module: nn.Module) -> dict[str, int]:
    """The features whose ids the model's loss reads, each with its index among the features of a batch."""
    wanted = getattr(module, "loss_features", ())
    schema: Any = getattr(module, "schema", None)
    names = [feature.name for feature in schema.sparse] if wanted else []
    return {name: names.index(name) for name in wanted}


def made_by(optimizer: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Makes the optimizer of some parameters. Returns None without parameters.

    Raises:
        ConfigError: the factory did not return an optimizer.
    """
    made: object = optimizer(parameters) if parameters else None
    if not isinstance(made, torch.optim.Optimizer | None):
        raise ConfigError(f"dense_optimizer made {kind_of(made)}; expected a torch.optim.Optimizer")
    return made


def begin_as_first(module: nn.Module, ranks: TrainerGroup) -> None:
    """Copies the first trainer's parameters and buffers to all trainers."""
    for tensor in (*module.parameters(), *module.buffers()):
        ranks.broadcast_tensor(tensor.detach())


def to_device(embeddings: Embeddings, device: torch.device) -> Embeddings:
    """Moves embeddings to a device."""
    parts: list[Block | Jagged] = [
        *embeddings.blocks,
        *embeddings.first_order,
        *embeddings.sequences.values(),
    ]
    for part in parts:
        if device.type != "cpu" or part.values.device.type != "cpu":
            return embeddings.mapped(
                lambda bags: bags.to(device),
                lambda each: Jagged(each.values.to(device), moved(each.offsets, device)),
            )
    return embeddings


def moved(numbers: NDArray[np.floating] | Tensor, device: torch.device) -> Tensor:
    """Moves numbers to a device. On a CPU, the result shares memory. A copy to a GPU is pinned and asynchronous."""
    tensor = torch.as_tensor(numbers)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

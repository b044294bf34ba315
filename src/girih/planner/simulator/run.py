"""Runs a step graph on simulated hosts: each trainer makes its steps, as far as credits, threads and barriers allow.

A step of a trainer is one copy of the graph. The operation that ``begins`` waits for a credit: at most ``in_flight`` steps
of a trainer have begun and not ended. Operations that run ``ahead`` wait until the trainer is near enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from girih.planner.simulator.cluster import Cluster, Process
from girih.planner.simulator.draws import Draws
from girih.planner.simulator.engine import Done, Engine
from girih.planner.simulator.hosts import Hosts
from girih.planner.steps.graph import Operation, StepGraph

PACKET_BYTES = 65_536
"""Largest packet that Linux passes to a receiver at once."""
CORE_END = 0.5
"""Part of the core-seconds of a message that its sender spends. The receiver spends the rest."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one process, for a timeline: seconds from the start of the run."""

    process: str
    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Log:
    """Events of a run.

    Attributes:
        ended: times at which steps of trainers ended, in order, with the trainer.
        staleness: of each read: the number of the trainer's earlier steps whose gradients were not applied.
        spans: operations, if asked for.
        core_s: role → core-seconds of its simulated processes. spent: the same at the start, and at each end of a step.
    """

    ended: list[tuple[float, int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    spans: list[Span] | None = None
    core_s: dict[str, float] = field(default_factory=dict)
    spent: list[dict[str, float]] = field(default_factory=lambda: [{}])


@dataclass(slots=True)
class _Meeting:
    """An operation that trainers do together."""

    waiting: list[Done] = field(default_factory=list)
    ended: list[Done] = field(default_factory=list)


class _Lane:
    """The steps of one trainer."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.begun = self.ended = 0
        self.num_applied = 0
        self.missing: dict[int, list[int]] = {}
        self.passed: set[tuple[str, int]] = set()
        self.early: dict[int, list[Done]] = {}
        self.unfinished: dict[int, int] = {}

    def open(self, step: int) -> None:
        """Makes the copy of the graph for one step, and begins its first operations."""
        run = self.run
        self.missing[step] = [len(each.after) + bool(each.follows) for each in run.operations]
        self.unfinished[step] = len(run.last)
        for index, each in enumerate(run.operations):
            if each.follows and (step == 0 or (each.follows, step - 1) in self.passed):
                self.missing[step][index] -= 1
                self.passed.discard((each.follows, step - 1))
            if not self.missing[step][index]:
                self.ready(index, step)

    def ready(self, index: int, step: int) -> None:
        """Begins an operation whose predecessors have ended, when the trainer is near enough."""
        operation = self.run.operations[index]
        if operation.begins:
            self.early.setdefault(step, []).append(lambda: self.run.begin(index, self.number, step))
            self.grant()
        elif operation.ahead is not None and step >= self.begun + operation.ahead:
            self.early.setdefault(step - operation.ahead, []).append(
                lambda: self.run.begin(index, self.number, step)
            )
        else:
            self.run.begin(index, self.number, step)

    def grant(self) -> None:
        """Lets the next step begin, if there is a credit."""
        while self.begun - self.ended < self.run.graph.in_flight:
            step = self.begun
            if not self._may_begin(step):
                return
            self.begun += 1
            for each in self.early.pop(step, []):
                each()
            self.open(self.begun + self.run.ahead)

    def _may_begin(self, step: int) -> bool:
        """Returns whether the operation that begins a step has all that it follows."""
        missing = self.missing.get(step)
        return missing is not None and missing[self.run.beginning] == 0

    def finish(self, index: int, step: int) -> None:
        """Begins what follows an operation."""
        run, operation = self.run, self.run.operations[index]
        missing = self.missing[step]
        if operation.applies:
            self.num_applied += 1
        for follower in run.followed.get(operation.name, ()):  # of the next step
            later = self.missing.get(step + 1)
            if later is None:  # it is not open yet
                self.passed.add((operation.name, step))
                continue
            later[follower] -= 1
            if not later[follower]:
                self.ready(follower, step + 1)
        for follower in run.after[index]:
            missing[follower] -= 1
            if not missing[follower]:
                self.ready(follower, step)
        if index in run.last:
            self.unfinished[step] -= 1
            if not self.unfinished[step]:
                self.ended += 1
                run.log.ended.append((run.engine.now_s, self.number))
                run.log.spent.append(dict(run.log.core_s))
                if self.ended == run.steps:
                    run.engine.stop()
                else:
                    self.grant()


class Run:
    """One simulated run.

    Args:
        steps: the run ends when one trainer has made this number of steps. speed: factor of the speed of all cores and links.
        keeps_spans: True keeps a timeline.
    """

    def __init__(
        self,
        graph: StepGraph,
        hosts: Hosts,
        draws: Draws,
        *,
        steps: int,
        speed: float = 1.0,
        keys: float = 0.0,
        keeps_spans: bool = False,
    ) -> None:
        self.graph, self.steps, self.draws = graph, steps, draws
        self.slow = 1 / speed
        self.engine, self.cluster = Engine(), Cluster(graph, hosts)
        self.log = Log(spans=[] if keeps_spans else None)
        self.operations = graph.operations
        index = {each.name: number for number, each in enumerate(self.operations)}
        self.after: list[list[int]] = [[] for _ in self.operations]
        self.followed: dict[str, list[int]] = {}
        for number, each in enumerate(self.operations):
            for name in each.after:
                self.after[index[name]].append(number)
            if each.follows:
                self.followed.setdefault(each.follows, []).append(number)
        self.last = {index[name] for name in graph.last}
        self.beginning = next(number for number, each in enumerate(self.operations) if each.begins)
        self.ahead = max((each.ahead for each in self.operations if each.ahead is not None), default=0)
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        cluster = self.cluster
        self.shares = {
            role: draws.shares(len(each), keys, cluster.stands_for)
            for role, each in cluster.processes.items()
        }
        self.lanes = [_Lane(self, number) for number in range(cluster.trainers)]

    def go(self) -> None:
        """Runs until a trainer has made all its steps."""
        for lane in self.lanes:
            for step in range(self.ahead + 1):
                lane.open(step)
        self.engine.run()

    def begin(self, index: int, lane: int, step: int) -> None:
        """Begins an operation, or waits for the other trainers."""
        operation = self.operations[index]
        if operation.reads:
            of_lane = self.lanes[lane]
            self.log.staleness.append(max(0, step - of_lane.num_applied))

        def ended() -> None:
            self.lanes[lane].finish(index, step)

        if not operation.together or self.cluster.trainers == 1:
            self._perform(operation, lane, step, ended)
            return
        meeting = self._meetings.setdefault((index, step), _Meeting())

        def arrived() -> None:
            meeting.ended.append(ended)
            if len(meeting.ended) == self.cluster.trainers:
                del self._meetings[index, step]
                for each in meeting.ended:
                    each()

        meeting.waiting.append(lambda: self._perform(operation, lane, step, arrived))
        if len(meeting.waiting) == self.cluster.trainers:
            for each in meeting.waiting:
                each()

    def _perform(self, operation: Operation, lane: int, step: int, done: Done) -> None:
        if operation.takes:
            process = self.cluster.of(operation, operation.role, lane, step)[0]
            process.executor(self.engine, operation.takes).acquire(done)
            return
        if operation.frees:
            process, after = self.cluster.of(operation, operation.role, lane, step)[0], done

            def done() -> None:
                process.executor(self.engine, operation.frees).release()
                after()

        of = self.cluster.stands_for if operation.together else 1.0
        factor = self.slow * self.draws.factor(of=of)
        sources = self.cluster.of(operation, operation.role, lane, step)
        if operation.to:
            targets = self.cluster.of(operation, operation.to, self._next(operation, lane), step)
            pairs = [(source, target) for source in sources for target in targets]
        else:
            pairs = [(source, source) for source in sources]
        shares = self.shares[operation.to if len(sources) == 1 and operation.to else operation.role]
        threads = [source.threads(operation.executor) for source, _ in pairs]
        joined = _joined(sum(map(len, threads)), done)
        for number, (source, target) in enumerate(pairs):
            share = (shares[number] if len(pairs) > 1 else 1.0) / len(pairs) / len(threads[number])
            for thread in threads[number]:
                self._at(operation, source, target, share, factor, joined, thread)

    def _next(self, operation: Operation, lane: int) -> int:
        """Returns the trainer that receives: the next one, if trainers send to each other."""
        return (lane + 1) % self.cluster.trainers if operation.to == operation.role else lane

    def _at(
        self,
        operation: Operation,
        source: Process,
        target: Process,
        share: float,
        factor: float,
        done: Done,
        thread: str,
    ) -> None:
        """Performs a part of an operation at one process, or between two. An empty ``thread`` is any thread."""
        engine, start_s = self.engine, self.engine.now_s
        executor = source.executor(engine, thread) if thread else None

        def ended() -> None:
            if executor is not None:
                executor.release()
            if self.log.spans is not None:
                self.log.spans.append(Span(source.title, operation.name, start_s, engine.now_s))
            done()

        def begin() -> None:
            nonlocal start_s
            start_s = engine.now_s
            if operation.to:
                self._send(operation, source, target, share, factor, ended)
            else:
                work = operation.core_s * share * source.load * factor
                delay_s = operation.delay_s * factor
                engine.after(delay_s, lambda: self._compute(source, work, operation.threads, ended))

        if executor is None:
            begin()
        else:
            executor.acquire(begin)

    def _send(
        self, operation: Operation, source: Process, target: Process, share: float, factor: float, done: Done
    ) -> None:
        """Sends a message. It ends when its bytes have arrived, and both ends have done their work."""
        engine = self.engine
        load = max(source.load, target.load)
        size, core_s = self.slow * operation.sent_bytes * share * load, operation.core_s * share * factor
        received_s = core_s * (1 - CORE_END) * target.load
        arrived = _joined(3, done)
        if source.pid == target.pid:
            done()
            return
        local = source.host is target.host and not source.host.group.link_per_process
        delay_s = operation.delay_s * factor
        if local:
            engine.after(delay_s + size / operation.bytes_per_s, arrived)
        else:
            delay_s += operation.hops * 1e-3 * max(source.host.group.delay_ms, target.host.group.delay_ms)
            links = (source.out, target.into)
            slowest = min(each.rate for each in links)
            if slowest * operation.packet_s < PACKET_BYTES:  # it waits for each packet
                received_s += factor * operation.packet_s * size / PACKET_BYTES
            turns = 2.0 if operation.in_turns else 1.0
            engine.after(delay_s, lambda: engine.start(size, links, operation.bytes_per_s, arrived, turns))
        self._compute(source, core_s * CORE_END * source.load, 1.0, arrived)
        self._compute(target, received_s, 1.0, arrived)

    def _compute(self, process: Process, core_s: float, threads: float, done: Done) -> None:
        self.log.core_s[process.role] = self.log.core_s.get(process.role, 0.0) + core_s
        self.engine.start(core_s, (process.host.cores,), threads, done)


def _joined(count: int, done: Done) -> Callable[[], None]:
    """Returns a function that calls ``done`` when it is called for the ``count``-th time."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            done()

    return one

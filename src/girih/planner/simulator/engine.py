"""A discrete-event engine: activities share capacities fairly, executors do one thing at a time, and timers end delays.

An activity is an amount of work, such as core-seconds or bytes. It needs one capacity (the cores of a host) or two (the
sending and the receiving direction of two links), and it has a highest rate. Rates are max-min fair: no activity can get
more without taking it from an activity that has less. For one capacity this is processor sharing. Two activities are
neighbours if they share a capacity, so a change only affects the rates of one connected set.

The engine has no clock and no random numbers. Equal calls give equal results.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

Done = Callable[[], None]
EPSILON = 1e-12


class Capacity:
    """A divisible resource, such as the cores of a host or one direction of a link.

    Attributes:
        rate: the amount per second that it gives in all.
        burst: the amount that it gives at once after it was idle, as a token bucket does.
        served: the amount that it gave so far.
        waiting_s: the integral over time of the number of its activities.
    """

    __slots__ = ("activities", "burst", "name", "rate", "served", "since_s", "tokens", "waiting_s")

    def __init__(self, name: str, rate: float, burst: float = 0.0) -> None:
        self.name, self.rate, self.burst, self.tokens = name, rate, burst, burst
        self.activities: dict[Activity, None] = {}
        self.served = self.waiting_s = self.since_s = 0.0

    def tick(self, now_s: float) -> None:
        """Advances the integrals and the tokens. Call it before activities change."""
        passed_s = now_s - self.since_s
        used = sum(each.rate for each in self.activities)
        self.served += used * passed_s
        self.waiting_s += len(self.activities) * passed_s
        self.tokens = min(self.burst, self.tokens + max(0.0, self.rate - used) * passed_s)
        self.since_s = now_s


class Activity:
    """Work in progress on capacities."""

    __slots__ = ("capacities", "done", "left", "most", "rate", "since_s", "stamp")

    def __init__(self, work: float, capacities: tuple[Capacity, ...], most: float, done: Done) -> None:
        self.left, self.capacities, self.most, self.done = work, capacities, most, done
        self.rate = self.since_s = 0.0
        self.stamp = 0


class Executor:
    """A thread that does one thing at a time, in the order of requests.

    Attributes:
        busy_s: seconds in which it was held. waiting_s: the integral over time of the number of waiting requests.
        longest: the largest number of waiting requests.
    """

    __slots__ = ("busy_s", "engine", "held", "longest", "name", "queue", "since_s", "waiting_s")

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.held, self.longest = engine, name, False, 0
        self.queue: deque[Done] = deque()
        self.busy_s = self.waiting_s = self.since_s = 0.0

    def tick(self, now_s: float) -> None:
        """Advances the integrals."""
        self.busy_s += self.held * (now_s - self.since_s)
        self.waiting_s += len(self.queue) * (now_s - self.since_s)
        self.since_s = now_s

    def acquire(self, begin: Done) -> None:
        """Calls ``begin`` when earlier requests have released the executor."""
        self.tick(self.engine.now_s)
        if self.held:
            self.queue.append(begin)
            self.longest = max(self.longest, len(self.queue))
        else:
            self.held = True
            begin()

    def release(self) -> None:
        """Gives the executor to the next request."""
        self.tick(self.engine.now_s)
        if self.queue:
            self.queue.popleft()()
        else:
            self.held = False


class Engine:
    """The clock and the events.

    Attributes:
        now_s: the time, in seconds from the start.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Activity | None, int, Done | None]] = []
        self._numbers = count()

    def after(self, delay_s: float, then: Done) -> None:
        """Calls ``then`` after a delay."""
        if delay_s <= 0.0:
            then()
        else:
            heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), None, 0, then))

    def start(
        self, work: float, capacities: tuple[Capacity, ...], most: float, done: Done, turns: float = 1.0
    ) -> None:
        """Begins an activity. ``done`` is called when its work is finished.

        Args:
            work: an amount in the unit of the capacities. most: the highest rate of this activity.
            turns: number of such activities that use the capacities in turns, each with its own tokens.
        """
        for each in capacities:
            each.tick(self.now_s)
        free = min((each.tokens for each in capacities if each.burst), default=0.0)
        if free > 0.0:
            for each in capacities:
                each.tokens -= min(work, free, each.tokens)
            work -= min(work, free)
        work *= turns
        if work <= EPSILON:
            done()
            return
        activity = Activity(work, capacities, most, done)
        activity.since_s = self.now_s
        for each in capacities:
            each.activities[activity] = None
        self._share(capacities)

    def run(self, until_s: float = float("inf")) -> None:
        """Handles events until none is left, or until a time."""
        while self._events and self._events[0][0] <= until_s:
            at_s, _, activity, stamp, then = heapq.heappop(self._events)
            if activity is None:
                self.now_s = at_s
                if then is not None:
                    then()
            elif stamp == activity.stamp:
                self.now_s = at_s
                self._finish(activity)

    def stop(self) -> None:
        """Drops all events, so :meth:`run` returns."""
        self._events.clear()

    def _finish(self, activity: Activity) -> None:
        for each in activity.capacities:
            each.tick(self.now_s)
            del each.activities[activity]
        activity.stamp = -1
        self._share(activity.capacities)
        activity.done()

    def _share(self, changed: Iterable[Capacity]) -> None:
        """Sets the rates of all activities that are connected with the changed capacities."""
        capacities: dict[Capacity, None] = dict.fromkeys(changed)
        activities: dict[Activity, None] = {}
        stack = list(capacities)
        while stack:
            for activity in stack.pop().activities:
                if activity not in activities:
                    activities[activity] = None
                    for each in activity.capacities:
                        if each not in capacities:
                            capacities[each] = None
                            stack.append(each)
        for each in capacities:
            each.tick(self.now_s)
        for activity, rate in fair_rates(list(activities)).items():
            if rate == activity.rate:
                continue
            activity.left = max(0.0, activity.left - activity.rate * (self.now_s - activity.since_s))
            activity.rate, activity.since_s = rate, self.now_s
            activity.stamp += 1
            ends_s = self.now_s + activity.left / rate
            heapq.heappush(self._events, (ends_s, next(self._numbers), activity, activity.stamp, None))


def fair_rates(activities: list[Activity]) -> dict[Activity, float]:
    """Returns max-min fair rates, by progressive filling (Bertsekas and Gallager, Data Networks, 1992, §6.5.2)."""
    left: dict[Capacity, float] = {}
    users: dict[Capacity, int] = {}
    for activity in activities:
        for each in activity.capacities:
            left[each] = each.rate
            users[each] = users.get(each, 0) + 1
    rates: dict[Activity, float] = {}
    open_ones = activities
    while open_ones:
        shares = {each: left[each] / number for each, number in users.items() if number}
        least = min(shares.values(), default=float("inf"))
        slow = [each for each in open_ones if each.most <= least * (1 + EPSILON)]
        if not slow:  # the busiest capacity fills up
            full = {each for each, share in shares.items() if share <= least * (1 + EPSILON)}
            slow = [each for each in open_ones if not full.isdisjoint(each.capacities)]
        for activity in slow:
            rates[activity] = rate = max(min(least, activity.most), EPSILON)
            for each in activity.capacities:
                left[each] = max(0.0, left[each] - rate)
                users[each] -= 1
        open_ones = [each for each in open_ones if each not in rates]
    return rates

"""Runs a training function again in the same process whenever the members change."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch import nn
from torch.distributed import Work
from torch.nn.parallel import DistributedDataParallel

from ftcoord import concurrency, stop
from ftcoord.config import full_text, seconds, whole
from ftcoord.coordination.address import DAY_MS, Job
from ftcoord.core.elastic import Place
from ftcoord.elastic.ddp import wrapped
from ftcoord.elastic.group import Group, MembersChanged, Way, checked, current, set_current, way_of
from ftcoord.elastic.members import Members
from ftcoord.elastic.state import State
from ftcoord.errors import ConfigError, FtcoordError
from ftcoord.logs import log_change, show_if_asked

log = logging.getLogger(__name__)

R = TypeVar("R")

JOB: Final = "FTCOORD_JOB"
"""The variable with the run's id."""
FRUITLESS: Final = 5
"""In so many groups of the same members a collective may fail here first, while no step is committed."""
_callbacks: list[Callable[[int, int], object]] = []
_MOST: Final = 2**31 - 1


def run(
    min_size: int = 1,
    *,
    job: str | None = None,
    endpoints: str = "",
    backend: str | None = None,
    join_timeout: float = 600.0,
    timeout: timedelta = timedelta(minutes=30),
) -> Callable[[Callable[[State], R]], Callable[[State], R]]:
    """Decorates a function that trains a `State`: it is called again, in the same process, whenever the members change.

    All processes of a run call it with states that are alike. Each call of the decorated function has a default process
    group whose members all live, and a state that is the same on all. When a member is lost, its collectives raise at
    once; when a process waits to join, `State.commit()` does. What the step had done so far is done again. The function
    returns when all members have returned from it. It has no process group then.

    Args:
        min_size: the fewest members that train; with fewer, they keep their state and wait.
        job: the run's id: the variable FTCOORD_JOB, or torchrun's --rdzv-id, by default.
        endpoints: etcd's, such as "h1:2379,h2:2379"; FTCOORD_ENDPOINTS by default. Login and TLS as everywhere, from
            FTCOORD_USER, FTCOORD_CA_CERT and so on.
        backend: gloo or nccl; by default nccl where there is a GPU: call torch.cuda.set_device before.
        join_timeout: seconds that members wait for enough others, and for one that does not come to the next group.
        timeout: how long a collective may take.

    The decorated function raises, besides what the function itself does:

    - `ConfigError` for bad settings, before it connects to etcd;
    - `RuntimeError` when etcd does not answer at the start;
    - `TooFewMembers`, which names who is missing, after `join_timeout`;
    - `FtcoordError` when nobody has a right state any more, or the members' torch differs;
    - SystemExit(0) if the run has finished before this process could join it.
    """
    fewest = whole(1, _MOST)("min_size", min_size)
    limit = seconds("join_timeout", join_timeout)

    def decorate(train: Callable[[State], R]) -> Callable[[State], R]:
        @functools.wraps(train)
        def call(state: State) -> R:
            if not isinstance(state, State):
                raise TypeError(f"{train.__name__} takes an elastic.State, not {type(state).__name__}")
            checked(backend)
            where = Job("etcd", endpoints, _job_of(job), min_replicas=fewest, join_timeout_ms=DAY_MS)
            show_if_asked()
            with ExitStack() as ends:
                ends.callback(stop.set_place, None)
                members = ends.enter_context(Members(where, limit))
                way = way_of(backend, timeout, members.store)
                ends.callback(way.close)
                return _Run(where.name, members, way, state).train(train)

        return call

    return decorate


def _job_of(job: str | None) -> str:
    found = job or os.environ.get(JOB) or os.environ.get("TORCHELASTIC_RUN_ID")
    if not found or found == "none":  # torchrun's own default
        raise ConfigError(JOB, None, "give the run an id of its own, by this variable or elastic.run(job=...)")
    return full_text(JOB, found)


class _Run:
    """One process's part in a run, in its main thread."""

    def __init__(self, name: str, members: Members, way: Way, state: State) -> None:
        self._name, self._members, self._way, self._state = name, members, way, state
        self._fruitless = 0
        self._last: tuple[frozenset[str], int] = frozenset(), -1

    def train(self, train: Callable[[State], R]) -> R:
        group, why, since = None, "it starts", concurrency.now()
        while True:
            group = self._next_group(group, why, since)
            try:
                return self._train(group, train)
            except RuntimeError as error:  # as backward() raises, also for MembersChanged
                if not group.over and not _is_of_torch_distributed(error):
                    self._blame(error)
                    raise
                group.fail(error)
                _let_go(error)
            except MembersChanged as error:
                _let_go(error)
            except BaseException as error:
                self._blame(error)
                raise
            finally:
                set_current(None)
                group.release()
            since, why = concurrency.now(), group.over
            self._leave(group)

    def _next_group(self, before: Group | None, why: str, since: float) -> Group:
        state, members = self._state, self._members
        handle = self._way.be_alone()
        number, rank = state.place
        place = Place(state.progress, number, rank, self._way.name, handle)
        arrangement = members.ask(place, before.arrangement if before is not None else None)
        if arrangement is None:
            log.warning("run %r is over: this process came too late, and ends", self._name)
            raise SystemExit(0)
        if not arrangement.has_state:
            raise FtcoordError(
                f"run {self._name!r}: no member has a right state, since all were between an optimizer's step and"
                " commit(): start from a checkpoint, and commit() after each optimizer.step()"
            )
        group = Group(arrangement, members.rank(arrangement), self._way.device)
        names = ", ".join(arrangement.names)
        log_change(
            log,
            f"run {self._name!r}, group {group.number}: rank {group.rank} of {group.world} at step {arrangement.step},"
            f" {concurrency.now() - since:.2f} s after {why}: {names}",
            run=self._name,
            quorum=group.number,
            rank=group.rank,
        )
        return group

    def _train(self, group: Group, train: Callable[[State], R]) -> R:
        """Raises MembersChanged if it is over before all have finished."""
        self._members.follow(group)
        self._way.form(group)
        set_current(group)
        for callback in _callbacks:
            callback(group.rank, group.world)
        self._state.take_place(group)
        members, number = self._members, group.number
        with closing(members.open_store()) as waits:
            group.at_end(waits.close)
            stops = (members.store, waits, group.rank, group.world, members.ask_stop)
            place = stop.Place(*stops, reason_key="run/stop", keys=f"stops/{number}")
            stop.set_place(place)
            result = train(self._state)
            how = f"finished: all members of group {number} have returned at step {self._state.step}"
            if (made := place.stop) is not None:
                made.close()  # the others need not wait for this one's promise
                if made.has_stopped:
                    how = f"stopped: all ranks at step {self._state.step}: {made.reason}"
            if not members.finish(group, how):
                raise MembersChanged(group.over)
        log_change(log, f"run {self._name!r} has {how}", run=self._name, quorum=number, rank=group.rank)
        return result

    def _leave(self, group: Group) -> None:
        is_first = self._members.tell_end(group)
        self._count_fruitless(group, group.failure if is_first else None)
        self._state.give_up_step()
        if self._way.others() and not _callbacks:
            raise FtcoordError(
                "there are process groups beside the default one, whose members have changed: make them in a function"
                " that elastic.on_change has registered"
            )

    def _count_fruitless(self, group: Group, failure: BaseException | None) -> None:
        """Raises the error if this process was the first to see a collective fail again and again."""
        now = frozenset(group.arrangement.names), self._state.step
        if now != self._last:
            self._last, self._fruitless = now, 0
        self._fruitless += failure is not None
        if failure is not None and self._fruitless > FRUITLESS:
            self._blame(failure)
            raise failure

    def _blame(self, error: BaseException) -> None:
        self._members.blame(f"{socket.gethostname()} (pid {os.getpid()}) raised {type(error).__name__}: {error}"[:1000])


def _let_go(error: BaseException | None) -> None:
    """Drop tracebacks: they hold the group's collectives, and so its connections."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _is_of_torch_distributed(error: BaseException) -> bool:
    """Whether a collective raised it."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed."):
            return True
        trace = trace.tb_next
    return False


# -- for the function that trains -------------------------------------------------------------------------------------


def wait(work: Work) -> None:
    """Wait for a collective that was begun with `async_op=True`. Raises MembersChanged at once when the group is over,
    where `work.wait()` might wait until the collective's timeout."""
    current().wait(work)


def on_change(callback: Callable[[int, int], object]) -> Callable[[int, int], object]:
    """Call `callback(rank, world)` for each new group, before the state is made alike: to make further process groups
    in it. Those of the last group are gone by then. May be used as a decorator."""
    _callbacks.append(callback)
    return callback


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """The model in torch's DistributedDataParallel, whose waits end with MembersChanged when the group is over.

    Make it anew in each call of the function that trains, from `state.model`. It averages gradients over the ranks; see
    `Sampler.weight`.

    Args:
        model: the model, on its device, not wrapped.
        options: torch's.
    """
    group = current()
    if unfit := options.keys() & {"process_group", "device_mesh", "init_sync"}:
        raise ConfigError(min(unfit), options[min(unfit)], "leave it out: the group and its state are those of the run")
    return wrapped(group, model, options)

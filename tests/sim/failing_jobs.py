"""Jobs that fail in memory and in virtual time: torchrun's agents as torch runs them, their workers, sentinels and
timers; what begins a failure, and what peers do then as real systems do it.

Of ftcoord all is real but what it asks the kernel: see `simulator.stubs`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from simulator.oracles import RUN
from simulator.plan import Plan
from simulator.role import Hold, Role
from simulator.stubs import installed, replacing
from simulator.trace import Trace
from simulator.world import Process, World
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from virtual import MemoryEtcd, Scheduler

from ftcoord import concurrency
from ftcoord.core import timers as records
from ftcoord.core.layout import KEY_PREFIX, decided_key, members_span, timers_key
from ftcoord.core.rendezvous_records import RoundHead, WorkerFailure, parse_decided
from ftcoord.core.timers import TimerInfo
from ftcoord.etcd.api import Event, Get, Put
from ftcoord.etcd.client import Namespace
from ftcoord.operator.orders import Order, planned
from ftcoord.rendezvous import handler as handlers, node as nodes
from ftcoord.rendezvous.settings import RendezvousSettings
from ftcoord.rendezvous.workers import WorkerProcess, WorkerWatch, _agents_own, reason_of
from ftcoord.timer import etcd_timer as timers

LEASE_TTL: Final = 5
LAST_CALL: Final = 12.0
"""Seconds: longer than a lease, as it is with the defaults."""
WORKER_TTL: Final = 10
SIGABRT, SIGKILL, SIGSEGV, SIGPIPE, SIGTERM = 6, 9, 11, 13, 15


def exited(code: int) -> int:
    """The status of a process that ended with this code, as `os.wait` says it; that of a signal is its number."""
    return code << 8


@dataclass(frozen=True)
class Case:
    """What a seed draws.

    Args:
        kinds: of the failures, in the order in which they are injected; each on another node.
        gaps: seconds between them.
        size: how many nodes there are.
        local_size: how many workers each has.
        restarts: `--max-restarts`.
        at_decider: whether the first befalls the node that decides, and its host.
    """

    seed: int
    kinds: tuple[str, ...]
    gaps: tuple[float, ...]
    size: int
    local_size: int
    restarts: int
    at_decider: bool
    delay: float

    @property
    def unclear(self) -> bool:
        """Whether peers may end as those do that begin a failure: that is told in the order in which it happens. So the
        first one must have been told by then, or be a lost host."""
        return self.kinds[0] in AT_ONCE or (self.kinds[0] == "host_loss" and self.restarts > 0)


@dataclass
class Worker:
    """One process of a node's worker group.

    Args:
        status: how it ended, as `os.wait` says it; None while it runs.
    """

    node: Node
    known: WorkerProcess
    status: int | None = None
    ends_at: float | None = None

    @property
    def name(self) -> str:
        """How a failure's line begins."""
        return f"worker {self.known.pid} (rank {self.known.rank}, local rank {self.known.local_rank})"

    def raises(self, text: str) -> None:
        """`record` leaves what its main function raises; the process ends later."""
        self._leave({"message": text, "extraInfo": {"py_callstack": f"Traceback ...\n{text}", "timestamp": "1"}})

    def _leave(self, message: dict[str, object]) -> None:
        path, process = self.known.error_file, self.node.process
        Path(path).write_text(json.dumps({"message": message}))
        with process.world.scheduler.process(process.name):
            at = concurrency.wall()
        os.utime(path, (at, at))

    def ends(self, status: int) -> None:
        """If it still runs."""
        if self.status is None and self.node.process.lives:
            self.status = status
            self.node.noticed(self)

    def has_failed(self) -> bool:
        return self.status not in (None, 0)


class KernelsWord(WorkerWatch):
    """The real watch, told by the simulation which workers end."""

    def __init__(
        self, workers: list[Worker], memory: Memory, failed: Callable[..., None], timer_of: Callable[[int], str]
    ) -> None:
        self._failed, self._timer_of, self._memory = failed, timer_of, memory  # type: ignore[assignment]
        self._agents_own = _agents_own()
        self._first = None
        self._workers = {at: one.known for at, one in enumerate(workers)}
        self._processes = workers
        self._watches = True
        for one in workers:  # before it began to watch
            self.see(one)

    def see(self, worker: Worker) -> None:
        """A worker may have ended."""
        if self._watches and worker.status is not None and worker in self._processes:
            self._watches = not self._tells(worker.known, worker.status)

    def _unseen(self) -> list[WorkerFailure]:
        return [self._failure_of(one.known, one.status) for one in self._processes if self._has_failed(one.status)]

    def end(self) -> None:
        self._watches = False


@dataclass
class Memory:
    """What the kernel counts of a node's control group."""

    ran_out: bool = False

    def grew(self) -> bool:
        return self.ran_out


class Node(Role):
    """torchrun on one node: `SimpleElasticAgent.run`, and what `launch_agent` does around it.

    Args:
        name: its host's.
        settings: the rendezvous'.
        folder: for error files.
    """

    def __init__(self, job: Job, name: str, settings: RendezvousSettings, case: Case, folder: Path) -> None:
        super().__init__(job, random.Random(f"{name} {case.seed}"))
        self.name = name
        self._settings, self._local_size, self._folder = settings, case.local_size, folder
        self.restarts = case.restarts
        self.job = job
        self.memory = Memory()
        self.workers: list[Worker] = []
        self.rounds: list[int] = []
        self.told: list[str] = []
        """The messages of its `rdzv` events."""
        self.ended: BaseException | None = None
        self.stops_for: float | None = None
        """When somebody told its agent to stop, and until when its workers take to end."""
        self._woken = concurrency.event()
        self._unseen: deque[Worker] = deque()  # in the order in which they ended
        self._seeing = concurrency.lock("Node._seeing")
        self._pids = 1000 * (1 + len(job.nodes))
        self.handler: handlers.EtcdRendezvousHandler
        self.process: Process

    @classmethod
    def missing(cls, world: World, since: float) -> str:
        """Nothing: a failing job is awaited until all of its nodes have ended."""
        return ""

    def live(self, process: Process) -> None:
        self.process = process
        handler = self.handler = handlers.EtcdRendezvousHandler(self._settings, Hold(process.client))  # type: ignore[arg-type]
        handler.host = process.name
        handler._resources.node = nodes.Node(process.client, self._settings, process.name, process.name)
        handler.prepare()
        try:
            self._run(handler)
        except SignalException as error:  # `launch_agent` says nothing, and the process ends
            self.ended = error
            handler._resources.leave()
        except BaseException as error:
            self.ended = error
            handler.shutdown()
        else:
            handler.shutdown()

    def _run(self, handler: handlers.EtcdRendezvousHandler) -> None:
        self._start(handler)
        while not self.process.leaves.is_set():
            self._woken.wait(self.draw.choice((0.1, 0.3, 1.0)))
            self._woken.clear()
            if self.stops_for is not None:
                self._stop(self.stops_for)
                raise SignalException("Process 1 got signal: 15", sigval=SIGTERM)  # type: ignore[arg-type]
            if any(one.has_failed() for one in self.workers):
                self.restarts -= 1
                self._stop(self.draw.choice((0.0, 0.2, 2.0)))
                if self.restarts < 0:
                    failures = {one.known.rank: self._failure(one) for one in self.workers if one.has_failed()}
                    raise ChildFailedError("train", failures)
                self._start(handler)
            elif handler.num_nodes_waiting():
                self._stop(self.draw.choice((0.0, 0.2, 2.0)))
                self._start(handler)

    @staticmethod
    def _failure(worker: Worker) -> ProcessFailure:
        assert worker.status is not None
        code = worker.status >> 8 if worker.status > 0xFF else -worker.status
        return ProcessFailure(worker.known.local_rank, worker.known.pid, code, worker.known.error_file)

    def _start(self, handler: handlers.EtcdRendezvousHandler) -> None:
        info = handler.next_rendezvous()
        self.rounds.append(handler._node.round.number)  # type: ignore[union-attr]
        self.workers = [self._worker(info.rank * self._local_size + at, at) for at in range(self._local_size)]

    def _worker(self, rank: int, local_rank: int) -> Worker:
        self._pids += 1
        return Worker(self, WorkerProcess(self._pids, rank, local_rank, str(self._folder / f"{self._pids}.json")))

    def _stop(self, seconds: float) -> None:
        """SIGTERM, and until all have ended. Some heed it in their own way."""
        for one in self.workers:
            if one.status is None:
                status = self.draw.choice((SIGTERM, SIGTERM, exited(143), exited(1)))
                self.job.after(seconds * self.draw.random(), partial(one.ends, status))
        while any(one.status is None for one in self.workers):
            self._woken.wait(1.0)
            self._woken.clear()

    def noticed(self, worker: Worker) -> None:
        """The kernel has told the agent, and the watch's thread, that one has ended."""
        self._woken.set()
        watch = self.handler._resources.watch
        if watch is not None:
            self._unseen.append(worker)
            self.process.begin(partial(self._see, watch), "workers")

    def _see(self, watch: Any) -> None:
        """The kernel tells the watch's only thread of one end after the other."""
        with self._seeing:
            watch.see(self._unseen.popleft())

    def watch(self, _mark: str, failed: Callable[..., None], _broken: object, timer_of: Callable[[int], str]) -> Any:
        return KernelsWord(self.workers, self.memory, failed, timer_of)

    def stop_agent(self, seconds: float) -> None:
        """A scheduler's SIGTERM; the workers take so many seconds to end."""
        self.stops_for = seconds
        self._woken.set()

    def interrupt(self) -> None:
        self.handler._node.stop()
        self._woken.set()

    # -- timers -------------------------------------------------------------------------------------------------------

    def serve_timers(
        self, prefix: str, etcd: Any, expiring: Callable[[TimerInfo], object], is_embedded: bool
    ) -> Callable[[], None]:
        """The real server, on a thread of the simulation's."""
        server = timers.EtcdTimerServer(Namespace(prefix, etcd), expiring=expiring, reap=self._reap)
        server._watchdog_thread = concurrency.thread(server._watchdog_loop, "watchdog")  # type: ignore[assignment]
        server._watchdog_thread.start()
        return server.stop

    def _reap(self, timer: TimerInfo) -> bool:
        for one in self.workers:
            if one.known.pid == timer.pid:
                one.ends(SIGKILL)
        return True

    def enters(self, worker: Worker, scope: str, seconds: float) -> None:
        """A worker acquires a timer, and hangs."""
        lease = self.process.client.grant(WORKER_TTL).id
        known, until = worker.known, int(1000 * (self.job.scheduler.time + seconds))
        what = records.Worker(self.name, known.pid, start=1, node=self.name, rank=known.rank, ledger=3)
        timer = records.Timer(
            scope, after_ms=int(1000 * seconds), until_ms=until, wall_ms=until, slot=0, token=known.pid
        )
        key = timers_key(RUN, self.name, lease)
        self.process.client.txn((), [Put(key, records.encode(records.HeldTimers(what, (timer,))), lease)])

    def runs_worker(self, pid: int) -> bool:
        return any(one.known.pid == pid and one.status is None for one in self.workers)


@dataclass
class Root:
    """What begins a failure, by itself.

    Args:
        kind: of `KINDS`.
        node: whom it befalls.
        line: how everybody has to be told of it.
    """

    kind: str
    node: Node
    line: str


class Job(World):
    """All of one failing job."""

    def __init__(self, scheduler: Scheduler, etcd: MemoryEtcd, plan: Plan) -> None:
        super().__init__(scheduler, etcd, plan, Trace(["operator", "etcd"]))
        self.nodes: list[Node] = []
        self.records: list[RoundHead] = []
        """All that were decided."""

    def _committed(self, events: list[Event]) -> None:
        """The oracles of the simulator hold for runs that nobody ends."""
        for event in events:
            if not event.kv.key.endswith("/tail"):
                self.trace.note(self.scheduler.time, "etcd", "=", event)
            if event.kv.key == decided_key(RUN) and event.kind == "put":
                self.records.append(parse_decided(event.kv.key, event.kv.value))

    def add(self, node: Node) -> None:
        """Start it."""
        self.nodes.append(node)
        node.process = self.start(node, node.name)

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Later, by the world's clock."""

        def wait() -> None:
            self.scheduler.sleep(seconds)
            act()

        with self.scheduler.process("operator"):
            concurrency.thread(wait, "operator").start()

    def until(self, holds: Callable[[], object], what: str, timeout: float = 60.0) -> None:
        deadline = self.scheduler.time + timeout
        while not holds():
            assert self.scheduler.time < deadline, f"not within {timeout:g} virtual seconds: {what}"
            self.scheduler.sleep(0.2)

    def deciding(self) -> Node:
        """The node whose member is the oldest."""
        kv = self.observer.range(Get(members_span(RUN), limit=1, order="oldest")).one
        assert kv is not None
        owner = self.owners[kv.lease]
        return next(one for one in self.nodes if one.process is owner)

    @property
    def node_now(self) -> Node:
        """That of the process which asks."""
        return next(one for one in self.nodes if one.name == self.scheduler.process_now)


@contextlib.contextmanager
def kernel_of(job: Job) -> Iterator[None]:
    """In place of the kernels of all hosts, and of torch's recorder of events."""

    def record(**event: Any) -> None:
        job.node_now.told.append(event["message"])

    with installed(job.plan.seed, job.sentinel, lambda _kept: None), replacing() as put:
        put(handlers, "address_trouble", lambda *_: "")
        put(handlers, "WorkerWatch", lambda *given, starting: job.node_now.watch(*given))
        put(handlers, "serve_timers", lambda *given, mark: job.node_now.serve_timers(*given))
        put(handlers, "why_process_ends", lambda: reason_of(job.node_now.ended))
        put(handlers, "construct_and_record_rdzv_event", record)
        put(timers, "host_id", lambda: job.node_now.name)
        put(timers, "holds", lambda _prefix, worker, _timer: job.node_now.runs_worker(worker.pid))
        yield


# -- what begins a failure -------------------------------------------------------------------------------------------

OWN_ERRORS: Final = (
    "ValueError: loss is nan",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/7'",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AssertionError",
)
PEER_ERRORS: Final = (
    "RuntimeError: [third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:2390",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2272, remote process exited or there was a"
    " network error, NCCL version 2.27.5 ncclRemoteError: A call failed possibly due to a network error",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed",
    "BrokenPipeError: [Errno 32] Broken pipe",
)
OOM: Final = "was killed by the kernel, since its control group had no memory left (OOM)"


class Injector:
    """Makes failures happen in one job."""

    def __init__(self, job: Job, draw: random.Random) -> None:
        self._job, self._draw = job, draw

    def inject(self, kind: str, node: Node) -> Root:
        """Now, and on this node."""
        self._job.note(f"{kind} on {node.name}")
        return Root(kind, node, getattr(self, f"_{kind}")(node))

    def _worker(self, node: Node) -> Worker:
        return self._draw.choice(node.workers)

    def _ends(self, node: Node, status: int, words: str) -> str:
        worker = self._worker(node)
        worker.ends(status)
        return f"{node.name}: {worker.name} {words}"

    def _exception(self, node: Node) -> str:
        worker, text = self._worker(node), self._draw.choice(OWN_ERRORS)
        worker.raises(text)
        self._job.after(self._draw.choice((0.0, 0.3, 1.5)), partial(worker.ends, exited(1)))
        return f"{node.name}: {worker.name} raised {text}"

    def _exit_code(self, node: Node) -> str:
        code = self._draw.choice((1, 3, 77))
        return self._ends(node, exited(code), f"exited with code {code}")

    def _sigkill(self, node: Node) -> str:
        return self._ends(node, SIGKILL, "was killed by signal 9 (SIGKILL)")

    def _sigsegv(self, node: Node) -> str:
        return self._ends(node, SIGSEGV, "was killed by signal 11 (SIGSEGV)")

    def _oom(self, node: Node) -> str:
        node.memory.ran_out = True
        return self._ends(node, SIGKILL, OOM)

    def _hang(self, node: Node) -> str:
        """In a step, of which its peers wait for the end."""
        worker, others = self._worker(node), [one for one in self._job.nodes if one is not node]
        node.process.begin(partial(node.enters, worker, "step", 2.0), "worker")
        for other in others:
            after = self._draw.uniform(2.5, 6.0)
            other.process.begin(partial(other.enters, self._worker(other), "all_reduce", after), "worker")
        return f"{node.name}: {worker.name} was killed, since its timer 'step' had expired"

    def _agent_dies(self, node: Node) -> str:
        fates = OOM, "was killed by signal 9 (SIGKILL)", "exited with code 1"
        fate = node.process.sentinel.fate = self._draw.choice(fates)
        node.process.kill(with_host=False)
        return f"{node.name} {fate}"

    def _eviction(self, node: Node) -> str:
        order = Order("evict", "run", node.name, "ann@desk", "it smells")
        planned(self._job.observer, KEY_PREFIX, order, 5.0)[1]()
        return f"{node.name} was evicted by ann@desk: it smells"

    def _preemption(self, node: Node) -> str:
        node.stop_agent(self._draw.choice((0.0, 0.5, 2.0)))
        return f"{node.name} was stopped by SIGTERM"

    def _host_loss(self, node: Node) -> str:
        node.process.kill(with_host=True)
        return f"{node.name} is gone (its lease ended)"

    def follow(self, root: Root, *, unclear: bool, after: tuple[float, float]) -> None:
        """What its peers do, some of them, and when.

        Args:
            unclear: whether some end as those do that have begun a failure.
            after: seconds.
        """
        ways = [self._reset, self._reset, self._reset, self._broken_pipe]
        ways += [self._abort, self._exit] if unclear else []
        for node in self._job.nodes:
            for worker in node.workers if node is not root.node else ():
                if self._draw.random() < 0.5:
                    self._job.after(self._draw.uniform(*after), partial(self._draw.choice(ways), worker))

    def _reset(self, worker: Worker) -> None:
        if worker.status is None and worker.node.process.lives:
            worker.raises(self._draw.choice(PEER_ERRORS))
            worker.ends(exited(1))

    def _broken_pipe(self, worker: Worker) -> None:
        worker.ends(SIGPIPE)

    def _abort(self, worker: Worker) -> None:
        worker.ends(SIGABRT)

    def _exit(self, worker: Worker) -> None:
        worker.ends(exited(1))


AT_ONCE: Final = ("exit_code", "sigkill", "sigsegv", "oom", "agent_dies", "eviction")
"""Told within milliseconds: the kernel sees it, or etcd is told so."""
LATE: Final = ("exception", "hang", "preemption", "host_loss")
"""Told when the process has ended, when a time is over, when all workers are stopped, or when a lease ends."""
KINDS: Final = (*AT_ONCE, *LATE)

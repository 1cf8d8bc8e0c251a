"""The ask ports of simulated processes, and the network between them: frames arrive late, in order, or not while a
process is cut off; a connection ends when one of its processes dies, unless its host is lost with it."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ftcoord import concurrency
from ftcoord.coordination import ask_desk, ask_line
from ftcoord.coordination.port import Frame, Handler, WrongKey
from simulator.stubs import replacing

if TYPE_CHECKING:
    from simulator.world import Process, World

FIRST_PORT: Final = 20_000
GIVES_UP: Final = 30.0
"""Seconds after which TCP gives a connection up that brings nothing."""
LOOKS: Final = 0.2
"""Seconds between two tries to get a frame through."""


class Sockets:
    """All ports and connections of one world."""

    def __init__(self, world: World) -> None:
        self._world, self._numbers = world, itertools.count(FIRST_PORT)
        self._draw = random.Random(f"{world.plan.seed} ports")
        self.ports: dict[str, Port] = {}
        self._ends: list[_End] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In place of sockets."""
        with replacing() as put:
            put(ask_desk, "listen_for", lambda _job: self._listen())
            put(ask_desk, "stop_listening", lambda _listener: None)
            put(ask_desk, "Port", lambda *given, **named: Port(self, *given, **named))
            put(ask_line, "Line", self._connect)
            yield

    def killed(self, process: Process) -> None:
        """Its system closes its sockets."""
        for end in [*self._ends]:
            if end.owner is process:
                end.close()
        for address, port in [*self.ports.items()]:
            if port.owner is process:
                del self.ports[address]

    def break_one(self, draw: random.Random) -> None:
        """An asker's end is reset; the other end learns of it when another connection may already stand."""
        if ends := [one for one in self._ends if one.port is None and one.is_open]:
            end = draw.choice(ends)
            end.lingers = draw.uniform(0, 1)
            end.close()

    def _listen(self) -> tuple[str | None, str]:
        if self._world.plan.by_key:
            return None, ""
        address = f"{self._world.asking.name}:{next(self._numbers)}"
        return address, address

    def _connect(self, host: str, port: int, key: bytes, deadline: float, about: Mapping[str, Any]) -> _End:
        caller = self._world.asking
        there = self.ports.get(f"{host}:{port}")
        while there is not None and not (self.passes(caller, there.owner) and self.passes(there.owner, caller)):
            self._world.scheduler.sleep(LOOKS)
            if concurrency.now() > deadline:
                raise TimeoutError("the other end did not answer in time")
        self._world.scheduler.sleep(self.delay())
        if there is None or there.is_closed:
            raise ConnectionRefusedError("nobody listens there")
        if key != there.key:
            raise WrongKey("what listens there has another key")
        mine, its = _End(self, caller, about), _End(self, there.owner, about)
        mine.other, its.other, its.port = its, mine, there
        self._ends += [mine, its]
        there.ends.append(its)
        for end in (mine, its):
            end.start()
        return mine

    def delay(self) -> float:
        """Seconds that a frame takes."""
        return self._draw.uniform(0, self._world.plan.network.delay)

    def passes(self, sender: Process, receiver: Process) -> bool:
        """Whether a frame gets from one to the other now."""
        return not (
            "requests" in (sender.port_cut, sender.link.cut)
            or "answers" in (receiver.port_cut, receiver.link.cut)
            or any(one.is_cut and not one.link.cut for one in (sender, receiver))
            or any(one.has_lost_its_host for one in (sender, receiver))
        )

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What is made meanwhile belongs to no process."""
        with self._world.scheduler.process("main"):
            yield

    def sleep(self, seconds: float) -> None:
        self._world.scheduler.sleep(seconds)


class _End:
    """One end of a connection: a `Line` for who has connected, a `Peer` at the port."""

    def __init__(self, network: Sockets, owner: Process, about: Mapping[str, Any]) -> None:
        self._network, self.owner, self.about = network, owner, about
        self.other: _End
        self.port: Port | None = None
        self._sent: Any = concurrency.inbox()
        self._received: Any = concurrency.inbox()
        self.is_open, self.lingers = True, 0.0

    def start(self) -> None:
        """Have a thread of the network carry what is sent."""
        with self._network.outside():
            concurrency.thread(self._carry, "network").start()

    def send(self, kind: str, payload: bytes, _deadline: float = 0.0) -> None:
        if not self.is_open and self.port is None:
            raise ConnectionError("the connection is closed")
        self._sent.put(Frame(kind, payload))

    def receive(self, deadline: float) -> Frame:
        try:
            frame = self._received.get(timeout=max(deadline - concurrency.now(), 0))
        except concurrency.Empty:
            raise TimeoutError("the other end did not answer in time") from None
        if frame is None:
            raise ConnectionError("the other end has closed the connection")
        return frame

    def close(self) -> None:
        """Idempotent. The other end learns of it like of a frame; who receives here, at once."""
        if self.is_open:
            self.is_open = False
            self._sent.put(None)
            self._received.put(None)

    def arrives(self, frame: Frame | None) -> None:
        if self.port is not None:
            self.port.arrives(self, frame)
        else:
            self._received.put(frame)

    def _carry(self) -> None:
        frame: Frame | None = Frame("", b"")
        while frame is not None:
            frame = self._sent.get()
            self._network.sleep(self._network.delay() + (self.lingers if frame is None else 0))
            waited = 0.0
            while not self._network.passes(self.owner, self.other.owner) and waited < GIVES_UP:
                self._network.sleep(LOOKS)
                waited += LOOKS
            if waited >= GIVES_UP:
                frame = None
                self.arrives(None)
            self.other.arrives(frame)


class Port:
    """In place of `ftcoord.coordination.port.Port`."""

    def __init__(self, network: Sockets, listener: str, key: bytes, handler: Handler) -> None:
        self.owner, self.key, self.is_closed = network._world.asking, key, False
        self._network, self._address, self._handler = network, listener, handler
        self.ends: list[_End] = []
        self._ended: set[_End] = set()
        self._arrived: deque[tuple[Any, Frame | None]] = deque()
        self._due: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._wakes = concurrency.event()
        network.ports[listener] = self
        self._thread = concurrency.thread(self._run, handler.name)
        self._thread.start()

    @property
    def is_quiet(self) -> bool:
        return not self._arrived and not self._is_busy

    def submit(self, call: Callable[[], None]) -> None:
        self._due.append(call)
        self._wakes.set()

    def close_peer(self, peer: _End, _why: str) -> None:
        self._ended.add(peer)
        peer.close()

    def arrives(self, end: _End, frame: Frame | None) -> None:
        """Of one connection in the order of its frames; nothing after its end."""
        if end not in self._ended:
            self._arrived.append((end, frame))
            self._wakes.set()
        if frame is None:
            self._ended.add(end)

    def close(self) -> None:
        self.is_closed = True
        self._network.ports.pop(self._address, None)
        self._wakes.set()
        if self._thread is not concurrency.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self.is_closed:
            left = self._handler.tick() - concurrency.now()
            if not (self._arrived or self._due):
                self._wakes.wait(min(max(left, 0), concurrency.LONGEST_WAIT))
            self._wakes.clear()
            self._is_busy = bool(self._arrived)
            batch = [self._arrived.popleft() for _ in range(len(self._arrived))]
            if batch:
                self._handler.handle([one for one in batch if one[0] not in self._ended or one[1] is None])
            self._is_busy = False
            while self._due:
                self._due.popleft()()
        for end in self.ends:
            self._ended.add(end)
            end.close()

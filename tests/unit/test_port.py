"""The port with a greeting of proofs: what passes, and what bad callers and bad ports cost the others."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from helpers import DEADLINE, eventually, in_fork

from ftcoord import concurrency, fork
from ftcoord.coordination import port as ports
from ftcoord.coordination.port import (
    LARGEST_FRAME,
    LARGEST_GREETING,
    VERSION,
    Frame,
    FrameReader,
    Line,
    Peer,
    Port,
    WrongKey,
    _proof,
    encode_frame,
    listen,
)

KEY = bytes(range(16))
NONCE = "0" * 32


def soon() -> float:
    return concurrency.now() + DEADLINE


class Echo:
    """Answers each frame with its payload, and notes what it got. A frame `w` makes it wait for `goes_on`."""

    name, hint = "port", "what to do"

    def __init__(self) -> None:
        self.batches: list[list[tuple[Peer, Frame | None]]] = []
        self.failures = list[BaseException]()
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def handle(self, batch: Sequence[tuple[Peer, Frame | None]]) -> None:
        self.batches.append([*batch])
        for peer, frame in batch:
            if frame is not None and frame.kind == "w":
                self.waits.set()
                assert self.goes_on.wait(DEADLINE)
            if frame is not None:
                peer.send("r", frame.payload)

    def tick(self) -> float:
        return math.inf

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def events(self) -> list[tuple[Any, Frame | None]]:
        return [(peer.about.get("name"), frame) for batch in [*self.batches] for peer, frame in batch]

    def ended(self) -> list[Any]:
        return [name for name, frame in self.events() if frame is None]


class Served:
    """A port and its handler."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1:0")
        self.at: tuple[str, int] = listener.getsockname()
        self.handler = Echo()
        self.failures = self.handler.failures
        self.port = Port(listener, KEY, self.handler)

    def line(self, name: object = "") -> Line:
        return Line(*self.at, KEY, soon(), {"name": name})

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.at, DEADLINE)

    def echoes(self, line: Line | None = None) -> None:
        """It serves."""
        with contextlib.closing(line or self.line()) as one:
            one.send("a", b"echo", soon())
            assert one.receive(soon()) == ("r", b"echo")


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.handler.goes_on.set()
    one.port.close()
    assert not one.failures


def raw(kind: str, **fields: object) -> bytes:
    return encode_frame(kind, json.dumps(fields).encode())


HELLO = raw("H", v=VERSION, nonce=NONCE, name="raw")


def welcomed(peer: socket.socket) -> str:
    """Greet the port; returns its nonce."""
    peer.sendall(HELLO)
    frames = FrameReader()
    while (frame := frames.take()) is None:
        frames.feed(peer.recv(4096))
    found = json.loads(frame.payload)
    assert (frame.kind, found["proof"]) == ("W", _proof(KEY, "W", (NONCE, found["nonce"])))
    return str(found["nonce"])


def proof(nonce: str, key: bytes = KEY) -> bytes:
    return raw("P", proof=_proof(key, "P", (NONCE, nonce)))


def prove(peer: socket.socket) -> None:
    peer.sendall(proof(welcomed(peer)))


def is_closed(peer: socket.socket) -> bool:
    """Waits for it."""
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(4096):
            pass
    return True


# -- what passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, LARGEST_FRAME])
def test_a_frame_arrives_as_it_was_sent(served: Served, size: int) -> None:
    payload = secrets.token_bytes(size)
    with contextlib.closing(served.line()) as line:
        line.send("a", payload, soon())
        assert line.receive(soon()) == ("r", payload)


def test_the_port_sends_at_any_time(served: Served) -> None:
    with contextlib.closing(served.line()) as line:
        line.send("a", b"", soon())
        line.receive(soon())
        ((peer, _),) = served.handler.batches[0]
        for number in range(3):
            served.port.submit(lambda number=number: peer.send("q", bytes([number])))
        assert [line.receive(soon()) for _ in range(3)] == [("q", bytes([number])) for number in range(3)]


def test_one_thread_receives_while_another_sends(served: Served) -> None:
    """More than the sockets hold: whoever waited for its own answer before it went on would wait for ever. Less than
    `MOST_UNSENT`, for a busy machine."""
    payload, count = bytes(1 << 20), 7
    with contextlib.closing(served.line()) as line:
        sender = threading.Thread(target=lambda: [line.send("a", payload, soon()) for _ in range(count)])
        sender.start()
        assert all(line.receive(soon()).payload == payload for _ in range(count))
        sender.join()


def test_what_is_submitted_runs_once_and_in_order(served: Served) -> None:
    done = list[tuple[int, int]]()
    threads = [
        threading.Thread(
            target=lambda one=one: [served.port.submit(lambda at=at: done.append((one, at))) for at in range(200)]
        )
        for one in range(4)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(done) == 800, "all have run")
    assert all([at for of, at in done if of == one] == [*range(200)] for one in range(4))


def test_all_that_is_there_comes_in_one_batch(served: Served) -> None:
    """The frames and the ends of a connection in their order; also of many connections."""
    lines = [served.line(number) for number in range(20)]
    with contextlib.closing(served.line("busy")) as busy:
        busy.send("w", b"", soon())
        assert served.handler.waits.wait(DEADLINE)
        for line in lines:
            line.send("a", b"1", soon())
            line.send("a", b"2", soon())
            line.close()
        served.handler.goes_on.set()
        eventually(lambda: len(served.handler.ended()) == 20, "all have ended")
        batch = served.handler.batches[1]
        for number in range(20):
            mine = [frame for peer, frame in batch if peer.about["name"] == number]
            assert mine == [Frame("a", b"1"), Frame("a", b"2"), None]


def test_a_receiver_may_try_again_and_is_woken_when_its_line_is_closed(served: Served) -> None:
    line = served.line()
    with pytest.raises(TimeoutError):
        line.receive(concurrency.now() + 0.01)
    line.send("a", b"x", soon())
    assert line.is_quiet in (True, False)
    assert line.receive(soon()).payload == b"x"
    assert line.is_quiet
    closer = threading.Timer(0.05, line.close)
    closer.start()
    with pytest.raises((ConnectionError, ValueError)):
        line.receive(soon())
    closer.join()


def test_a_closed_port_ends_its_lines_and_frees_its_place(served: Served) -> None:
    """What was submitted before is done."""
    line = served.line()
    line.send("a", b"", soon())
    line.receive(soon())
    ((peer, _),) = served.handler.batches[0]
    served.port.submit(lambda: peer.send("q", b"the last one"))
    served.port.close()
    assert line.receive(soon()) == ("q", b"the last one")
    with pytest.raises(ConnectionError):
        line.receive(soon())
    assert not line.is_quiet
    line.close()
    with pytest.raises(OSError, match="refused"):
        served.line()
    listen(f"127.0.0.1:{served.at[1]}").close()


def test_a_handler_that_fails_closes_all_and_is_reported() -> None:
    one = Served()

    def fail(*_: object) -> None:
        raise MemoryError("made by the test")

    line = one.line()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        one.handler.handle = fail  # type: ignore[method-assign]
        line.send("a", b"", soon())
        with pytest.raises(ConnectionError):
            line.receive(soon())
        one.port.close()
    assert [type(failure) for failure in one.failures] == [MemoryError]
    line.close()


# -- proofs ------------------------------------------------------------------------------------------------------------


def test_either_end_needs_the_key(served: Served) -> None:
    with pytest.raises(WrongKey):
        Line(*served.at, KEY[::-1], soon())
    with served.stranger() as peer:
        peer.sendall(proof(welcomed(peer), KEY[::-1]) + encode_frame("a", b"x"))
        assert is_closed(peer)
    with served.stranger() as peer:  # the port's own proof, sent back
        peer.sendall(raw("P", proof=_proof(KEY, "W", (NONCE, welcomed(peer)))) + encode_frame("a", b"x"))
        assert is_closed(peer)
    assert not served.handler.batches


def test_a_recorded_greeting_proves_nothing(served: Served) -> None:
    with served.stranger() as first, served.stranger() as second:
        said = proof(welcomed(first))
        first.sendall(said)
        welcomed(second)
        second.sendall(said + encode_frame("a", b"x"))
        assert is_closed(second)
    assert not [frame for _, frame in served.handler.events() if frame]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(100),
        encode_frame("W", b"{"),
        encode_frame("W", b"[" * 100_000),
        raw("W", nonce=NONCE),
        raw("W", nonce="short", proof=""),
        raw("X", nonce=NONCE, proof="0" * 64),
    ],
)
def test_what_listens_there_is_no_port(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as caller:
                caller.recv(4096)
                caller.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(ConnectionError, match="no port of ftcoord's"):
            Line(*listener.getsockname(), KEY, soon())
        server.join()


def test_what_listens_there_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        Line(*listener.getsockname(), KEY, concurrency.now() + 0.1)


# -- bad callers -------------------------------------------------------------------------------------------------------

STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": bytes(100),
    "too long": struct.pack(">Ic", LARGEST_GREETING + 1, b"H"),
    "no JSON": encode_frame("H", b"\xff\xfe"),
    "nested too deep": encode_frame("H", b"[" * LARGEST_GREETING),
    "no object": encode_frame("H", b"7"),
    "no nonce": raw("H", v=VERSION),
    "a nonce of another type": raw("H", v=VERSION, nonce=7),
    "a long nonce": raw("H", v=VERSION, nonce=NONCE + "0"),
    "another version": raw("H", v=VERSION + 1, nonce=NONCE),
    "another kind": raw("P", v=VERSION, nonce=NONCE),
    "a frame before the proof": HELLO + encode_frame("a", b"x"),
    "two greetings": HELLO + HELLO,
    "a wrong proof": HELLO + raw("P", proof="0" * 64) + encode_frame("a", b"x"),
    "half a character in the nonce": raw("H", v=VERSION, nonce="\ud800" * 32),
    "half a character": HELLO + raw("P", proof="\ud800"),
    "no proof": HELLO + raw("P"),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_cut_off_and_nobody_else(served: Served, said: bytes) -> None:
    with contextlib.closing(served.line()) as line, served.stranger() as peer:
        peer.sendall(said)
        assert is_closed(peer)
        assert not served.handler.batches
        served.echoes(line)


def test_a_proved_caller_that_sends_no_frames_is_cut_off(served: Served) -> None:
    with served.stranger() as peer:
        prove(peer)
        peer.sendall(encode_frame("a", b"x") + struct.pack(">Ic", LARGEST_FRAME + 1, b"a"))
        assert is_closed(peer)
    eventually(lambda: served.handler.ended() == ["raw"], "the handler is told of its end")
    assert served.handler.events()[0] == ("raw", Frame("a", b"x"))
    served.echoes()


STATES: dict[str, Callable[[socket.socket], object]] = {
    "silent": lambda peer: None,
    "half a greeting": lambda peer: peer.sendall(HELLO[:-1]),
    "greeted": lambda peer: peer.sendall(HELLO),
    "welcomed": welcomed,
    "half a proof": lambda peer: peer.sendall(proof(welcomed(peer))[:-1]),
    "proved": prove,
    "half a frame": lambda peer: peer.sendall(proof(welcomed(peer)) + encode_frame("a", b"x")[:-1]),
    "a frame": lambda peer: peer.sendall(proof(welcomed(peer)) + encode_frame("a", b"x")),
    "a frame and half": lambda peer: peer.sendall(proof(welcomed(peer)) + (2 * encode_frame("a", b"x"))[:-1]),
    "an unread answer": lambda peer: peer.sendall(proof(welcomed(peer)) + encode_frame("a", bytes(LARGEST_FRAME))),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("is_reset", [False, True], ids=["ends", "is reset"])
def test_a_caller_goes_away(served: Served, state: Callable[[socket.socket], object], is_reset: bool) -> None:
    with served.stranger() as peer:
        state(peer)
        if is_reset:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    served.echoes(served.line("other"))
    eventually(lambda: "other" in served.handler.ended(), "it serves on")
    has_proved = list(STATES.values()).index(state) >= list(STATES).index("proved")
    # A reset may discard the proof before the port has read it.
    if has_proved and not is_reset:
        eventually(lambda: "raw" in served.handler.ended(), "the handler is told")
    eventually(lambda: not served.port._unproved and not served.port._proved, "nothing is left of it")
    assert len([name for name in served.handler.ended() if name == "raw"]) <= has_proved


@pytest.mark.parametrize("state", [*STATES.values()][:5], ids=[*STATES][:5])
def test_who_does_not_prove_itself_in_time_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, served: Served, state: Callable[[socket.socket], object]
) -> None:
    with contextlib.closing(served.line()) as line, served.stranger() as proved:
        prove(proved)
        proved.sendall(encode_frame("a", b"x")[:-1])  # who has proved itself has time
        monkeypatch.setattr(ports, "GREETING_TIMEOUT", 0.1)
        with served.stranger() as peer:
            state(peer)
            assert is_closed(peer)
        proved.sendall(b"x")
        assert proved.recv(100)
        served.echoes(line)


def test_strangers_do_not_take_all_descriptors(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """The oldest are closed, long before their time is over, and callers are served all the while."""
    monkeypatch.setattr(ports, "MOST_UNPROVED", 4)
    with ExitStack() as stack:
        strangers = [stack.enter_context(served.stranger()) for _ in range(10)]
        assert all(is_closed(peer) for peer in strangers[:6])
        served.echoes()
        prove(strangers[9])
        strangers[9].sendall(encode_frame("a", b"x"))
        assert strangers[9].recv(100) == encode_frame("r", b"x")


def test_a_flood_of_strangers_does_not_stop_the_port(served: Served) -> None:
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), served.stranger() as peer:
                peer.sendall(HELLO)

    floods = [threading.Thread(target=flood) for _ in range(4)]
    for one in floods:
        one.start()
    try:
        with contextlib.closing(served.line()) as line:
            for _ in range(50):
                line.send("a", b"echo", soon())
                assert line.receive(soon()).payload == b"echo"
        served.echoes()
    finally:
        over.set()
        for one in floods:
            one.join()


def test_a_caller_that_does_not_read_is_cut_off_before_it_takes_all_memory(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(ports, "MOST_UNSENT", 1 << 20)
    with served.stranger() as peer:
        prove(peer)
        with contextlib.suppress(OSError):
            for _ in range(100):
                peer.sendall(encode_frame("a", bytes(1 << 20)))
        eventually(lambda: served.handler.ended() == ["raw"], "it is cut off")
    served.echoes()


def test_a_process_without_descriptors_logs_that_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, served: Served
) -> None:
    """And its port does not spin; who comes meanwhile is served when there are some again."""
    accept, refused, is_full = socket.socket.accept, list[None](), True

    def accept_if_there_is_room(listener: socket.socket) -> Any:
        if is_full:
            refused.append(None)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(ports, "ACCEPT_PAUSE", 0.05)
    monkeypatch.setattr(socket.socket, "accept", accept_if_there_is_room)
    with served.stranger() as peer:
        eventually(lambda: len(refused) >= 3, "it tries again")
        is_full = False
        welcomed(peer)
    (said,) = [record for record in caplog.records if "no connection is accepted for now" in record.message]
    assert "Too many open files" in said.message


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, served: Served) -> None:
    caplog.set_level(logging.DEBUG)
    for said in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\n\x1b[31m\n" * 20):
        with served.stranger() as peer:
            peer.sendall(said)
            assert is_closed(peer)
    (line,) = [record.message for record in caplog.records if "stranger" in record.message]
    assert "what to do" in line


# -- hosts and forks ---------------------------------------------------------------------------------------------------


def test_either_end_notices_a_host_that_lost_its_power(served: Served) -> None:
    with contextlib.closing(served.line()):
        eventually(lambda: served.port._proved, "it has proved itself")
        (peer,) = served.port._proved
        for descriptor in (peer._socket.fileno(), *list(fork._hidden)[-1:]):
            with socket.socket(fileno=os.dup(descriptor)) as one:
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15


def test_a_forked_child_keeps_no_socket_of_a_hidden_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        at = listener.getsockname()
        fork.hide_port(at[1])
        try:
            with socket.create_connection(at) as caller, listener.accept()[0] as taken:

                def look() -> None:
                    open_ = [os.readlink(f"/proc/self/fd/{one.fileno()}") for one in (listener, taken, caller, other)]
                    if [name.startswith("socket:") for name in open_] != [False, False, True, True]:
                        raise LookupError(str(open_))

                assert in_fork(look) == "None"
                taken.sendall(b"x")
                assert select.select([caller], [], [], DEADLINE)[0]
        finally:
            fork.unhide_port(at[1])


# -- other threads -----------------------------------------------------------------------------------------------------


def test_a_port_is_quiet_only_when_its_handler_has_all_that_has_arrived(served: Served) -> None:
    with contextlib.closing(served.line("first")) as first, contextlib.closing(served.line("second")) as second:
        first.send("w", b"", soon())
        assert served.handler.waits.wait(DEADLINE)
        assert not served.port.is_quiet
        second.send("a", b"", soon())
        served.handler.goes_on.set()
        eventually(lambda: served.port.is_quiet, "it has handled all")
        assert [name for name, _ in served.handler.events()] == ["first", "second"]


def test_what_has_arrived_and_was_not_read_is_noticed_at_once(served: Served) -> None:
    with contextlib.closing(served.line()) as line:
        eventually(lambda: served.port.is_quiet, "it waits")
        for number in range(200):
            before = len(served.handler.events())
            line.send("a", b"%d" % number, soon())
            if served.port.is_quiet:  # the loopback delivers before `send` returns
                assert len(served.handler.events()) > before
            line.receive(soon())


def test_any_thread_sends_and_one_whose_connection_has_ended_sends_nothing(served: Served) -> None:
    with contextlib.closing(served.line()) as line:
        line.send("a", b"", soon())
        line.receive(soon())
        ((peer, _),) = served.handler.batches[0]
        senders = [threading.Thread(target=lambda: [peer.send("x", b"y" * 1000) for _ in range(100)]) for _ in range(4)]
        for one in senders:
            one.start()
        assert [line.receive(soon()) for _ in range(400)] == [("x", b"y" * 1000)] * 400
        for one in senders:
            one.join()
    eventually(lambda: not peer.is_open, "it has ended")
    peer.send("x", b"")
    served.echoes()

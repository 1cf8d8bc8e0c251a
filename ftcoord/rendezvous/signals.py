"""Signals that end an agent: while it waits for its first round, and what the other nodes learn about it later."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

from torch.distributed.elastic.multiprocessing.api import SignalException

from ftcoord import concurrency
from ftcoord.core.history import OBEYED

_TORCHS_DEFAULT: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def handled_signals() -> list[signal.Signals]:
    """The signals that torch's agent handles: it forwards the signal to its workers, and ends."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _TORCHS_DEFAULT).split(",")
    return [signal.Signals[name.strip()] for name in names if name.strip() in signal.Signals.__members__]


@contextlib.contextmanager
def raised_as_exceptions() -> Iterator[None]:
    """Within this block, the signals that torchrun handles raise its SignalException, unless they have a handler.

    torch installs its handlers when it starts the first workers. Until then a SIGTERM would end the agent at once, and
    the others would wait for it until its lease expires. Does nothing outside the main thread, where Python sets no
    handlers.
    """
    if not concurrency.is_main_thread():
        yield
        return
    ours = [number for number in handled_signals() if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def reason_of(error: BaseException) -> str:
    """Why an agent that ends with this exception leaves, for the other nodes."""
    if isinstance(error, SignalException):
        number = signal.Signals(error.sigval)
    elif isinstance(error, KeyboardInterrupt):
        number = signal.SIGINT
    else:
        return type(error).__name__
    return f"{OBEYED}{'Ctrl-C (SIGINT)' if number == signal.SIGINT else number.name}"


def why_process_ends() -> str:
    """Why this process ends, for a node whose agent has not reported it.

    torch's agent turns a signal into an exception, and ends its process without a call to the rendezvous. Python keeps
    the exception with which the main thread ended.
    """
    last = getattr(sys, "last_value", None)
    return reason_of(last) if isinstance(last, SignalException | KeyboardInterrupt) else "its process ends"


def _raise(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number))

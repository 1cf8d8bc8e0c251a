"""The `ftcoord` command. Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from ftcoord import __version__, concurrency
from ftcoord.errors import EtcdError, FtcoordError

if TYPE_CHECKING:
    from ftcoord.embedded.server import EtcdServer


SIGNAL_INTERVAL: Final = 1.0
"""Seconds that a wait lasts at most. Python runs signal handlers between waits; one may come just before a wait."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except FtcoordError as error:
        print(f"ftcoord: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ftcoord: interrupted; everything it started has ended", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftcoord", description="Fault-tolerant PyTorch coordination on etcd.")
    parser.add_argument("--version", action="version", version=f"ftcoord {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train on three nodes, lose one, replace it (half a minute)")
    demo.add_argument("--logs", type=Path, help="where the agents' logs go (default: a new temporary folder)")
    demo.set_defaults(run=_demo)

    server = commands.add_parser("server", help="run an embedded etcd on this host until Ctrl-C")
    server.add_argument("--host", default="127.0.0.1", help="the address to serve on (default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=2379, help="the port to serve on (default: 2379; 0: a free one)")
    server.add_argument("--data-dir", help="keep the data here (default: a temporary folder, removed at the end)")
    server.set_defaults(run=_server)

    gateway = commands.add_parser("gateway", help="serve torchft's lighthouse protocol from etcd until Ctrl-C")
    gateway.add_argument("--etcd", required=True, metavar="ADDRESS", help="etcd://h1:2379,h2:2379/job?min_replicas=2")
    gateway.add_argument("--listen", default="127.0.0.1:29510", help="where to serve (default: 127.0.0.1:29510)")
    gateway.set_defaults(run=_gateway)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from ftcoord.demo.run import run_demo

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    run_demo(options.logs)
    return 0


def _server(options: argparse.Namespace) -> int:
    from ftcoord.embedded.server import EtcdServer

    ended = concurrency.event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with EtcdServer(host=options.host, port=options.port, data_dir=options.data_dir) as etcd:
        endpoint = etcd.get_endpoint()
        print(f"etcd serves on {endpoint}; Ctrl-C ends it", flush=True)
        print(f"torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint={endpoint} --rdzv-id=RUN ...", flush=True)
        _advise(etcd)
        while etcd.is_running() and not ended.wait(SIGNAL_INTERVAL):
            pass
        if not ended.is_set():
            print("ftcoord: etcd has ended by itself", file=sys.stderr)
    return 0 if ended.is_set() else 1


def _advise(etcd: EtcdServer) -> None:
    """Say what this release of etcd is good for: clients say nothing of it about an etcd that ftcoord started."""
    from ftcoord.etcd.release import newer_wanted

    version = str((etcd.http("GET", "/version") or {}).get("etcdserver", ""))
    if version and (wanted := newer_wanted(version)):
        print(
            f"etcd {version} is good for trying things out; it has known lease and watch bugs, so use {wanted} or"
            " newer for real training runs",
            flush=True,
        )


def _gateway(options: argparse.Namespace) -> int:
    from ftcoord.coordination import Gateway

    ended = concurrency.event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with Gateway(options.etcd, options.listen) as gateway:
        print(f"gateway serves on {gateway.address()}; Ctrl-C ends it", flush=True)
        print(f"TORCHFT_LIGHTHOUSE={gateway.address()}", flush=True)
        try:
            gateway.check(timeout=5)
        except EtcdError as error:
            print(f"ftcoord: replicas will wait until etcd can be reached: {error}", file=sys.stderr)
        while not ended.wait(SIGNAL_INTERVAL):
            if gateway.has_failed:
                print("ftcoord: the gateway has failed, see its log; start it again", file=sys.stderr)
                return 1
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""`ftcoord demo` and `ftcoord server`: with an etcd that ftcoord starts on this host."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ftcoord.commands.flags import Flag, add_command, until_interrupted, warn_of
from ftcoord.config import switch, text, whole

if TYPE_CHECKING:
    from ftcoord.embedded.server import EtcdServer


def _path(key: str, value: object) -> Path:
    return Path(text(key, value))


def add_commands(commands: Any) -> None:
    logs, data = (
        "folder for the agents' logs; a new one if omitted",
        "folder for etcd's data; a temporary one if omitted",
    )
    add_command(commands, demo, Flag("--logs FOLDER", "FTCOORD_DEMO_LOGS", logs, _path, None))
    port, open_ = "the port to serve on; 0 for a free one", "let all users of this host, and all who reach it, in"
    add_command(
        *(
            commands,
            server,
            Flag("--host HOST", "FTCOORD_SERVER_HOST", "the address to serve on", text, "127.0.0.1"),
        ),
        Flag("--port PORT", "FTCOORD_SERVER_PORT", port, whole(0, 65535), 2379),
        Flag("--data-dir FOLDER", "FTCOORD_SERVER_DATA_DIR", data, text, None),
        Flag("--no-login", "FTCOORD_SERVER_NO_LOGIN", open_, switch, 0),
    )


def demo(options: argparse.Namespace) -> int:
    """Train on three nodes, kill one, replace it (about a minute).

    The nodes run on this host, with an embedded etcd.
    """
    from ftcoord.demo.run import run_demo

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    run_demo(options.logs)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def server(options: argparse.Namespace) -> int:
    """Run an embedded etcd server on this host until Ctrl-C.

    It has a login whose password is in its data folder. Exits with status 1 if etcd ends.
    """
    from ftcoord.embedded.server import USER, EtcdServer

    warn_of(options.host, "can write all keys of this etcd unless it asks for a login; its traffic is plain text")
    ended = until_interrupted()
    login = not options.no_login
    with EtcdServer(host=options.host, port=options.port, data_dir=options.data_dir, login=login) as etcd:
        endpoint = etcd.get_endpoint()
        print(f"etcd serves on {endpoint}; Ctrl-C ends it. In the shells that use it:", flush=True)
        if login:
            print(f"export FTCOORD_USER={USER} FTCOORD_PASSWORD_FILE={shlex.quote(etcd.password_file())}", flush=True)
        print(f"torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint={endpoint} --rdzv-id=RUN ...", flush=True)
        advise(etcd)
        while not ended():
            if not etcd.is_running():
                print("ftcoord: etcd has exited; start it again", file=sys.stderr)
                return 1
    return 0


def advise(etcd: EtcdServer) -> None:
    """Print what this release of etcd is good for: clients do not warn about an etcd that ftcoord started."""
    from ftcoord.etcd.api import newer_wanted

    with etcd.get_client() as client:
        version = client.version
    if wanted := newer_wanted(version):
        bugs = "it has known lease and watch bugs, so use"
        print(
            f"etcd {version} is good for trying things out; {bugs} {wanted} or newer for real training runs", flush=True
        )

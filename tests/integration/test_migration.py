"""Job templates of torch's other etcd backends, and what else torchrun's users do with a backend."""

from __future__ import annotations

from pathlib import Path

import warm
from jobs import Job

from ftcoord.embedded.server import EtcdServer

REPLACE = {"FTCOORD_REPLACE_LEGACY": "True"}
OLD_CONF = {
    "etcd": {"protocol": "http", "etcd_prefix": "/old/p2p", "last_call_timeout": 3, "timeout": 90, "lease_ttl": 2},
    "etcd-v2": {"protocol": "HTTP", "read_timeout": 10, "keep_alive_interval": 1, "keep_alive_max_attempt": 2},
}
IGNORED = {"is_host": "1", "store_type": "file", "rank": 0, "cas_backoff_max_seconds": 3, "my_own": "hunter2"}
"""What torch's own agent tests, and templates made for c10d, give to every backend: `etcd` and `etcd-v2` ignore it."""


def test_an_old_template_runs_with_one_variable_more(etcd: EtcdServer, tmp_path: Path) -> None:
    """The etcd has no v2 API."""
    name = "etcd-v2"
    conf = {**OLD_CONF[name], **IGNORED}
    with Job(tmp_path, etcd.get_endpoint(), "1:2", "idle.py", backend=name, conf=conf, env=REPLACE) as job:
        job.start("ab")
        job.round_of("ab", kind="started")
        job.kill("a")
        job.round_of("b", kind="started")
        job.finish("b")
        terminal = job.agents["b"].terminal()
        assert terminal.count(f"--rdzv-backend={name} runs on ftcoord") == 1
        assert terminal.count(f"does not know; ignored: {', '.join(IGNORED)}") == 1
        assert "hunter2" not in terminal


def test_without_the_variable_the_old_names_stay_torchs(etcd: EtcdServer, tmp_path: Path) -> None:
    with Job(tmp_path, etcd.get_endpoint(), "1", backend="etcd", conf={"lease_ttl": 2}) as job:
        job.start("a")
        job.expect_exit(1, "a")
        assert "runs on ftcoord" not in job.terminals()


def test_the_old_names_from_python(etcd: EtcdServer) -> None:
    code = f"""
import ftcoord
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
for _ in range(2):
    ftcoord.install_legacy_names()
for name in ("etcd", "etcd-v2", "etcd-v3"):
    handler = get_rendezvous_handler(RendezvousParameters(name, "{etcd.get_endpoint()}", "python", 1, 1))
    print(type(handler).__name__, handler.get_backend())
"""
    done = warm.run("-c", code)
    assert done.returncode == 0, done.stderr
    names = ("etcd", "etcd-v2", "etcd-v3")
    assert done.stdout.splitlines() == [f"EtcdRendezvousHandler {name}" for name in names]


OLD_SAY = ("ConfigError timeout", "ConfigError read_timeout", "RendezvousConnectionError")
NEW_SAY = ("ConfigError timeout", "ConfigError is_host", "ConfigError is_host")
MALFORMED = {**dict.fromkeys(OLD_CONF, OLD_SAY), "etcd-v3": NEW_SAY, "etcd-v3-dynamic": NEW_SAY}
"""What each name says of a time-out that is none, of a negative one, and of a key that only the old ones know."""


def test_what_is_malformed_stays_refused_under_all_names() -> None:
    """And so does what nobody knows, under the new ones. Nothing listens at the endpoint: that is not come to."""
    code = f"""
import ftcoord
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
ftcoord.install_legacy_names()
for name in {MALFORMED!r}:
    for conf in ({{"timeout": "soon"}}, {{"read_timeout": -1, "is_host": "1"}}, {{"is_host": "1", "timeout": 1}}):
        parameters = RendezvousParameters(name, "127.0.0.1:1", "refused", 1, 1, request_timeout=1, **conf)
        try:
            get_rendezvous_handler(parameters)
        except Exception as error:
            print(name, type(error).__name__, getattr(error, "key", ""))
"""
    done = warm.run("-c", code)
    assert done.returncode == 0, done.stderr
    expected = [f"{name} {text}" for name, texts in MALFORMED.items() for text in texts]
    assert [line.strip() for line in done.stdout.splitlines()] == expected


def test_torchs_own_state_machine_on_etcd_v3(etcd: EtcdServer, tmp_path: Path) -> None:
    # torch takes who is silent for so long out of a round that is complete: it must be more than a busy machine pauses.
    conf = {"keep_alive_interval": 1, "keep_alive_max_attempt": 10}
    share_nothing = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Job(tmp_path, etcd.get_endpoint(), "2:3", backend="etcd-v3-dynamic", conf=conf, env=share_nothing) as job:
        job.start("abc")
        job.round_of("abc")
        job.kill("a")
        job.round_of("bc")
        job.finish("bc")

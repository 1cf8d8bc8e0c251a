"""The pictures of the page in docs/dashboard.md, from jobs as members write them, in a real chromium:

python tests/screenshots.py docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import CHROMIUM, Browser
from pages import page, write_history, write_quorum, write_run

from ftcoord import concurrency
from ftcoord.core import death_records
from ftcoord.core.death_records import Death
from ftcoord.core.history import HistoryEvent
from ftcoord.core.layout import KEY_PREFIX, death_key, member_id, run_prefix
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.client import EtcdClient

RUN, JOB = "resnet-50", "diloco-eu"
CAUSE = "gpu-a4 (pid 4711) was killed by the kernel, since its control group had no memory left (OOM)"


def main(folder: Path) -> None:
    """Write both pictures."""
    with EtcdServer() as etcd, EtcdClient(etcd.get_endpoint()) as client, TemporaryDirectory() as profile:
        write_jobs(client)
        browser = Browser(Path(profile))
        try:
            with page(etcd.get_endpoint()) as address:
                take(browser, f"{address}/?job={RUN}", (1100, 960, "light"), folder / "dashboard-job.png")
                take(browser, f"{address}/?job={JOB}", (390, 760, "dark"), folder / "dashboard-phone.png")
        finally:
            browser.close()


def write_jobs(client: EtcdClient) -> None:
    """A run of which a node has just died, and a job that trains."""
    leases = write_run(client, RUN, ["gpu-a1", "gpu-a2", "gpu-a3", "gpu-a4"])
    now = int(1000 * concurrency.wall())
    events = [
        HistoryEvent("round", 1, reason="4 nodes", wall_ms=now - 3_723_000),
        HistoryEvent("started", 1, reason="round 1 is ready on 4 nodes", wall_ms=now - 3_722_000),
        HistoryEvent("died", 1, "gpu-a4", "node3", CAUSE, wall_ms=now),
    ]
    write_history(client, RUN, events)
    client.put(death_key(run_prefix(KEY_PREFIX, RUN), member_id(leases[3])), death_records.encode(Death(CAUSE, 0)))
    client.revoke(leases[3])
    write_quorum(client, JOB, {"east": 4012, "north": 4012, "west": 4010})


def take(browser: Browser, address: str, screen: tuple[int, int, str], path: Path) -> None:
    """A picture of a job's page, once its leases are shown."""
    browser.look(*screen)
    browser.open(address)
    browser.shows("of 600 s")
    browser.screenshot(path)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not CHROMIUM:
        sys.exit("usage: python tests/screenshots.py FOLDER, where there is a chromium (FTCOORD_TEST_CHROMIUM)")
    main(Path(sys.argv[1]))

"""Workers that hear of a peer's death at once, and of what it died, long before a collective of NCCL's times out:

    ftcoord server --data-dir=etcd-data                                        # in one shell: an etcd
    export FTCOORD_ENDPOINTS=127.0.0.1:2379 FTCOORD_USER=root                  # in two others
    export FTCOORD_PASSWORD_FILE=$PWD/etcd-data/password
    RANK=0 WORLD_SIZE=2 python examples/lost_peer.py                           # and with RANK=1

`kill -9` one of them: the other one says who died of what, and ends, so that whoever started it can start it again.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

import ftcoord

JOB = os.environ.get("JOB", "lost-peer")
SILENCE = 10
"""Seconds after which a peer counts as lost of whom nobody says anything: its host is gone."""


def end_when_a_peer_is_lost() -> None:
    """Do not wait for a collective that will never be complete."""
    for event in ftcoord.watch_heartbeats(JOB):
        if event.kind == "lost" and event.reason != "left":
            print(f"{event.name} is lost: {event.cause or 'its host was not heard of'}", flush=True)
            os._exit(1)  # the main thread hangs in C; under torchrun the agent goes on from here


def main() -> None:
    """Steps without end."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ftcoord.register_init_methods()
    with ftcoord.Heartbeat(JOB, f"rank {rank}", ttl=SILENCE):
        watch = threading.Thread(target=end_when_a_peer_is_lost, daemon=True)
        watch.start()
        address = f"etcd://{os.environ['FTCOORD_ENDPOINTS']}/{JOB}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        print(f"rank {rank} of {world} trains", flush=True)
        try:
            while True:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:  # gloo notices that a peer's connection ended; NCCL waits, for 10 minutes
            print(f"a collective failed: {error}", flush=True)
            watch.join()


if __name__ == "__main__":
    main()

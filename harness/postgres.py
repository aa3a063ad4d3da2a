"""A PostgreSQL of its own for a benchmark: on loopback, in a temporary folder, gone afterwards.

Needs the server's programs (`apt-get install postgresql`); as root it runs as the user postgres, which it must not be.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def programs() -> Path | None:
    """Where initdb and pg_ctl lie."""
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("initdb"):
        places.append(Path(found).parent)
    return next((place for place in places if (place / "initdb").exists()), None)


@dataclass(frozen=True)
class Server:
    """A running server."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def call(self, program: str, *arguments: str) -> None:
        place = programs()
        assert place is not None
        user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        command = [*user, str(place / program), *arguments]
        subprocess.run(
            command,
            check=True,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            timeout=120,
        )

    def control(self, verb: str) -> None:
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        start = ["-o", options] if verb != "stop" else []
        log = ["-l", str(self.folder / "log")]
        self.call("pg_ctl", verb, "-w", "-D", str(self.folder / "data"), "-m", "fast", *log, *start)


@contextmanager
def postgres() -> Iterator[Server]:
    """A server for as long as the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pg") as name:
        folder = Path(name)
        if os.getuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        server = Server(folder, port)
        server.call("initdb", "-D", str(folder / "data"), "-U", "postgres", "-A", "trust", "-N")
        server.control("start")
        try:
            yield server
        finally:
            server.control("stop")

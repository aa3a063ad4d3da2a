"""An S3 server on loopback in a process of its own (moto), and a proxy before it that counts, drops and stalls requests."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any
from urllib.parse import parse_qs, urlsplit

HOST = "127.0.0.1"
_START = 60.0  # seconds until the server must answer, on a busy machine
_REFUSED = {"busy": (503, "SlowDown"), "forbidden": (403, "AccessDenied")}
_HOP = ("connection", "transfer-encoding", "keep-alive", "proxy-connection")
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}


@dataclass
class Traffic:
    """What went through the proxy, and what it does to requests."""

    requests: Counter[str] = field(default_factory=Counter)
    """Method -> how many were answered."""
    received: int = 0
    """Bytes of objects that clients got."""
    sent: int = 0
    """Bytes of objects that clients sent."""
    drop: int = 0
    """Every so manieth request loses its connection (before it is passed on, after it, in the middle of its answer), or is asked
    to come back later."""
    stall: int = 0
    """Every so manieth request gets no answer for a long time."""
    flip: int = 0
    """Of every so manieth part a bit is flipped on the way to the store."""
    rename: int = 0
    """Every so manieth part is answered with another ETag than it has."""
    page: int = 0
    """Every so manieth request is answered with a page of HTML."""
    listed: int = 0
    """Listings of objects, parts and uploads come in pages of so many."""
    forbid: bool = False
    """Every request is answered with 403."""
    harmed: int = 0
    """How many were dropped or stalled."""
    seen: int = 0
    lock: Lock = field(default_factory=Lock)

    def reset(self) -> None:
        with self.lock:
            self.requests.clear()
            self.received = self.sent = self.harmed = self.seen = 0

    def fate(self) -> str:
        """What happens to the next request: nothing, "lost", "unanswered", "cut", "busy", "stalled", "page" or "forbidden"."""
        with self.lock:
            self.seen += 1
            if self.forbid:
                return "forbidden"
            if self.drop and self.seen % self.drop == 0:
                self.harmed += 1
                return ("lost", "unanswered", "cut", "busy")[self.harmed % 4]
            if self.stall and self.seen % self.stall == 0:
                self.harmed += 1
                return "stalled"
            if self.page and self.seen % self.page == 0:
                self.harmed += 1
                return "page"
        return ""

    def harms(self, every: int) -> bool:
        """Whether this part is one of those that are harmed."""
        with self.lock:
            harmed = bool(every) and self.seen % every == 0
            self.harmed += harmed
            return harmed


@dataclass(frozen=True)
class ObjectStore:
    """A running store: the server's own port, and that of the proxy before it."""

    port: int
    proxy: int
    traffic: Traffic

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a client to the proxy."""
        return {**ACCOUNT, "AWS_ENDPOINT_URL": f"http://{HOST}:{self.proxy}"}

    def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A request to the server itself, past the proxy."""
        with closing(HTTPConnection(HOST, self.port, timeout=_START)) as connection:
            key = f"Credential={ACCOUNT['AWS_ACCESS_KEY_ID']}/20200101/us-east-1/s3/aws4_request"
            connection.request(method, path, body, {"Authorization": f"AWS4-HMAC-SHA256 {key}"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def put(self, folder: Path, path: str) -> None:
        """Copy a folder into the store, under bucket/prefix."""
        self.call("PUT", f"/{path.partition('/')[0]}")
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                status, said = self.call("PUT", f"/{path}/{file.relative_to(folder)}", file.read_bytes())
                assert status == 200, said

    def names(self, bucket: str, prefix: str) -> list[str]:
        """What follows a prefix in the names of a bucket."""
        _, raw = self.call("GET", f"/{bucket}?list-type=2&prefix={prefix}")
        return [key.removeprefix(prefix) for key in re.findall(r"<Key>([^<]*)</Key>", raw.decode())]

    def get(self, path: str) -> bytes:
        status, raw = self.call("GET", f"/{path}")
        assert status == 200, (path, raw)
        return raw


@contextmanager
def object_store(smallest: int = 5 << 20) -> Iterator[ObjectStore]:
    """Start a server and its proxy; both are gone at the end. `smallest` are the bytes that a part must have."""
    port, traffic = _free_port(), Traffic()
    environment = {**os.environ, **ACCOUNT, "S3_UPLOAD_PART_MIN_SIZE": str(smallest)}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ending = Event()
    proxy = _Proxy((HOST, 0), _handler(port, traffic, ending))
    thread = Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        _wait(port, server)
        yield ObjectStore(port, proxy.server_address[1], traffic)
    finally:
        ending.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        server.kill()
        server.wait()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that are killed leave broken connections


def _handler(port: int, traffic: Traffic, ending: Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def pass_on(self) -> None:
            fate = traffic.fate()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fate == "stalled":
                ending.wait(3600)
            if fate in ("lost", "stalled"):
                self._hang_up()
                return
            if fate in _REFUSED:
                self._refuse(*_REFUSED[fate])
                return
            if fate == "page":
                self._answer(200, "text/html", b"<html><body>sign in</body></html>")
                return
            part = "partNumber=" in self.path and self.command == "PUT"
            path = self.path
            if traffic.listed and self.command == "GET":
                path += f"&max-keys={traffic.listed}" if "list-type=2" in path else ""
                path += f"&max-parts={traffic.listed}" if "uploadId=" in path else ""
            if part and traffic.harms(traffic.flip):
                body = body[:-1] + bytes([body[-1] ^ 1])
            with closing(HTTPConnection(HOST, port, timeout=600)) as server:
                try:
                    server.request(self.command, path, body, dict(self.headers))
                    answer = server.getresponse()
                    raw = answer.read()
                    if traffic.listed and self.command == "GET" and "?uploads" in path:
                        raw = _some_uploads(path, raw, traffic)
                except (OSError, HTTPException):
                    self._hang_up()
                    return
            if fate == "unanswered":
                self._hang_up()
                return
            self.send_response_only(answer.status)
            renamed = part and traffic.harms(traffic.rename)
            for name, value in answer.getheaders():
                if name.lower() not in (*_HOP, "content-length"):
                    self.send_header(name, f'"{"d" * 32}"' if renamed and name.lower() == "etag" else value)
            told = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", told or str(len(raw)))
            self.end_headers()
            if fate == "cut":
                self.wfile.write(raw[: len(raw) // 2])
                self._hang_up()
                return
            self.wfile.write(raw)
            with traffic.lock:
                traffic.requests[self.command] += 1
                if answer.status in (200, 206):
                    traffic.received += len(raw) if self.command == "GET" else 0
                    traffic.sent += len(body) if self.command == "PUT" else 0

        def _refuse(self, status: int, code: str) -> None:
            raw = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self._answer(status, "application/xml", raw)

        def _answer(self, status: int, kind: str, raw: bytes) -> None:
            self.send_response_only(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    return Handler


def _some_uploads(path: str, raw: bytes, traffic: Traffic) -> bytes:
    """The next page of a list of uploads, which moto gives whole."""
    after = parse_qs(urlsplit(path).query).get("upload-id-marker", [""])[0].encode()
    found = re.findall(rb"<Upload>.*?</Upload>", raw, re.DOTALL)
    ids = [re.findall(rb"<UploadId>(.*?)</UploadId>", one)[0] for one in found]
    first = ids.index(after) + 1 if after in ids else 0
    last = first + traffic.listed
    if not found:
        return raw
    head, tail = raw.split(found[0], 1)[0], raw.rpartition(found[-1])[2]
    told = b"<IsTruncated>false</IsTruncated>"
    if last < len(found):
        with traffic.lock:
            traffic.harmed += 1
        (key,) = re.findall(rb"<Key>(.*?)</Key>", found[last - 1])
        told = b"<IsTruncated>true</IsTruncated><NextKeyMarker>%s</NextKeyMarker>" % key
        told += b"<NextUploadIdMarker>%s</NextUploadIdMarker>" % ids[last - 1]
    old = (
        rb"<(IsTruncated|NextKeyMarker|NextUploadIdMarker)>[^<]*</\1>|<(NextKeyMarker|NextUploadIdMarker) ?/>"
    )
    return re.sub(old, b"", head) + told + b"".join(found[first:last]) + re.sub(old, b"", tail)


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    until = monotonic() + _START
    while monotonic() < until and server.poll() is None:
        try:
            socket.create_connection((HOST, port), 1).close()
            return
        except OSError:
            sleep(0.05)
    raise RuntimeError("moto's server did not start; pip install 'moto[server]'")

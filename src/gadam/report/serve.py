"""Serve the report of a running sweep to a browser: read-only, and by default to this machine."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gadam.report.page import render
from gadam.runs import collect
from gadam.runs.collect import find_files

__all__ = ["Server"]

_RECORDS = (
    "run.json",
    "epochs.jsonl",
    "result.json",
    "manifest.json",
    "failure.json",
    "experiment.json",
    "sections/*.json",
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}


class Server(ThreadingHTTPServer):
    """Serves the page of some folders. The page is rendered again when a record has changed.

    Args:
        folders: Folders of runs. Files are served only from the first one.
        host: The address to listen on. The default accepts only this machine.
        port: The port; 0 picks a free one.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        self.folders = [Path(folder).resolve() for folder in folders]
        self.host = host
        self._page: tuple[str, bytes] = ("", b"")
        self._rendering = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def version(self) -> str:
        """Return a hash that changes with every record."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for name in _RECORDS:
                for path in find_files(folder, name):
                    try:
                        status = path.stat()
                    except FileNotFoundError:  # a retried run has just removed it
                        continue
                    digest.update(f"{path} {status.st_mtime_ns} {status.st_size}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> bytes:
        """Return the page, up to date."""
        with self._rendering:  # concurrent requests share one rendering
            version = self.version()
            if self._page[0] != version:
                self._page = (version, render(collect(self.folders), live=version).encode())
            return self._page[1]

    def file(self, path: str) -> Path | None:
        """Return a file in the first folder, or None if it is missing, hidden or outside.

        Args:
            path: The path of the request.
        """
        wanted = unquote(path).lstrip("/")
        if "\0" in wanted or any(name.startswith(".") for name in Path(wanted).parts):
            return None
        found = (self.folders[0] / wanted).resolve()  # follows links, which may lead outside
        inside = found.is_relative_to(self.folders[0])
        return found if inside and found.is_file() and found.suffix in _TYPES else None


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "gadam"
    timeout = 20.0  # seconds that a connection may be idle

    def do_GET(self) -> None:
        """Respond with the page, its version, or a file of the folder."""
        try:
            self._respond()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client disconnected or does not read
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"Bad request.", "text/plain")
        except OSError:
            self._send(HTTPStatus.NOT_FOUND, b"Not found.", "text/plain")

    def _respond(self) -> None:
        if not self._host_is_allowed():
            self._send(HTTPStatus.FORBIDDEN, b"Use this machine's own address.", "text/plain")
            return
        path = urlsplit(self.path).path
        if path == "/":
            self._send(HTTPStatus.OK, self.server.page(), _TYPES[".html"])
        elif path == "/version":
            self._send(HTTPStatus.OK, self.server.version().encode(), "text/plain")
        elif (file := self.server.file(path)) is not None:
            self._send(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix])
        else:
            self._send(HTTPStatus.NOT_FOUND, b"Not found.", "text/plain")

    do_HEAD = do_GET

    def _host_is_allowed(self) -> bool:
        """Reject DNS rebinding: a website that points its own name at this machine."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        local = ("127.0.0.1", "::1", "localhost")
        loopback = self.server.host in local or self.server.host.startswith("127.")
        return not loopback or host in (*local, self.server.host)

    def _send(self, status: HTTPStatus, content: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

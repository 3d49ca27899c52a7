"""The report of a sweep that runs, in a browser: read-only, of these folders, on this machine."""

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
from gadam.report.records import collect

__all__ = ["Server"]

_WATCHED = ("*.json", "epochs.jsonl", "sections/*")
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
    """Serves the page of some folders, made anew whenever a record has changed.

    Args:
        folders: of the runs; only what is in the first of them is served as files
        host: only this machine unless told otherwise
        port: 0 is any that is free
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        self.folders = [Path(folder).resolve() for folder in folders]
        self.host = host
        self._page: tuple[str, bytes] = ("", b"")
        self._making = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def version(self) -> str:
        """Changes with every record."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for name in (
                "run.json",
                "epochs.jsonl",
                "result.json",
                "experiment.json",
                "sections/*.json",
            ):
                for path in sorted(folder.rglob(name)):
                    status = path.stat()
                    digest.update(f"{path} {status.st_mtime_ns} {status.st_size}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> bytes:
        """The page as of now."""
        with self._making:  # once, however many look
            version = self.version()
            if self._page[0] != version:
                self._page = (version, render(collect(self.folders), live=version).encode())
            return self._page[1]

    def file(self, path: str) -> Path | None:
        """A file in the first folder; None for what is not there, hidden, or outside of it."""
        wanted = unquote(path).lstrip("/")
        if "\0" in wanted or any(part.startswith(".") for part in Path(wanted).parts):
            return None
        found = (self.folders[0] / wanted).resolve()  # a link may lead anywhere
        inside = found.is_relative_to(self.folders[0])
        return found if inside and found.is_file() and found.suffix in _TYPES else None


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "gadam"

    def do_GET(self) -> None:
        """Answer with the page, its version, or a file of the folder."""
        try:
            self._answer()
        except ConnectionError:
            pass  # who asked has left
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"this is not a request", "text/plain")
        except OSError:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing of that name here", "text/plain")

    def _answer(self) -> None:
        if not self._is_meant():
            self._send(HTTPStatus.FORBIDDEN, b"this server is asked by another name", "text/plain")
            return
        path = urlsplit(self.path).path
        if path == "/":
            self._send(HTTPStatus.OK, self.server.page(), _TYPES[".html"])
        elif path == "/version":
            self._send(HTTPStatus.OK, self.server.version().encode(), "text/plain")
        elif (file := self.server.file(path)) is not None:
            self._send(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix])
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing of that name here", "text/plain")

    do_HEAD = do_GET

    def _is_meant(self) -> bool:
        """Not a page elsewhere that has pointed a name of its own at this machine."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        here = ("127.0.0.1", "::1", "localhost")
        loopback = self.server.host in here or self.server.host.startswith("127.")
        return not loopback or host in (*here, self.server.host)

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

"""The live report: what it serves, and what it refuses."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import made
from gadam.report import serve
from gadam.report.serve import Server
from gadam.runs.files import write_json


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    made.sweep(tmp_path / "runs")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "runs" / "link.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "runs" / ".hidden.json").write_text("{}")
    with Server([tmp_path / "runs"]) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def request(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_it_listens_only_on_this_machine(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.startswith("http://127.0.0.1:")


def test_the_page_follows_the_records(server):
    status, before = request(server, "/")
    assert status == 200
    assert b"Made up" in before
    version = request(server, "/version")[1]
    assert version in before
    assert request(server, "/version")[1] == version
    made.run(Path(server.folders[0]) / "gadam-9", "Gadam", 9, epochs=1)
    assert request(server, "/version")[1] != version
    assert b"at epoch 1 of 6" in request(server, "/")[1]


def test_the_page_follows_failures(server):
    folder = Path(server.folders[0]) / "gadam-9"
    made.run(folder, "Gadam", 9, epochs=1)
    running = request(server, "/version")[1]
    assert b"out of memory" not in request(server, "/")[1]
    write_json(folder / "failure.json", {"reason": "out of memory"})
    assert request(server, "/version")[1] != running
    assert b"out of memory" in request(server, "/")[1]
    (folder / "failure.json").unlink()  # the run is tried again
    assert request(server, "/version")[1] == running
    assert b"out of memory" not in request(server, "/")[1]


def test_only_files_of_the_folder_are_served(server):
    status, content = request(server, "/experiment.json")
    assert status == 200
    assert json.loads(content)["name"] == "made"
    for path in (
        "/../secret.json",
        "/%2e%2e/secret.json",
        "/..%2fsecret.json",
        "//etc/passwd",
        "/link.json",
        "/.hidden.json",
        "/adamw-0",
        "/%00",
        "/nothing.json",
    ):
        assert request(server, path)[0] == 404, path


def test_it_is_read_only(server):
    for method in ("POST", "PUT", "DELETE"):
        assert request(server, "/", method)[0] == 501
    status, content = request(server, "/", "HEAD")
    assert (status, content) == (200, b"")


def test_other_host_names_are_refused(server):
    """A website could point its own name here to read the report (DNS rebinding)."""
    assert request(server, "/", Host="evil.example")[0] == 403
    assert request(server, "/", Host="localhost:8000")[0] == 200


def test_idle_connections_are_closed(server, monkeypatch, capsys):
    assert serve._Handler.timeout <= 60  # shorter in this test
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    address = ("127.0.0.1", server.server_address[1])
    for sent in (b"", b"GET / HTTP/1.1\r\nHost: local"):
        with socket.create_connection(address, timeout=20) as idle:
            idle.sendall(sent)
            assert idle.recv(1) == b""  # the server closed it
    assert request(server, "/version")[0] == 200
    assert "Traceback" not in capsys.readouterr().err

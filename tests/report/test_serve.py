"""The live report: what it shows, and what it refuses."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import made
from gadam.report.serve import Server


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


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.startswith("http://127.0.0.1:")


def test_the_page_follows_the_records(server):
    status, before = ask(server, "/")
    assert status == 200
    assert b"Made up" in before
    version = ask(server, "/version")[1]
    assert version in before
    assert ask(server, "/version")[1] == version
    made.run(Path(server.folders[0]) / "gadam-9", "Gadam", 9, epochs=1)
    assert ask(server, "/version")[1] != version
    assert b"at epoch 1 of 6" in ask(server, "/")[1]


def test_files_of_the_folder_and_nothing_else(server):
    status, content = ask(server, "/experiment.json")
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
        assert ask(server, path)[0] == 404, path


def test_it_only_reads(server):
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method)[0] == 501
    status, content = ask(server, "/", "HEAD")
    assert (status, content) == (200, b"")


def test_another_name_for_this_machine_is_refused(server):
    """A page elsewhere may point its own name here, to read what its visitor can."""
    assert ask(server, "/", Host="evil.example")[0] == 403
    assert ask(server, "/", Host="localhost:8000")[0] == 200

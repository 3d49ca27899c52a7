"""Downloads are all or nothing, and complete data sets are not downloaded again."""

from __future__ import annotations

import errno
import gc
import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from gadam.train.data import DataError, download, load, text
from gadam.train.data.download import fetch

RECORDS = bytes([3, 7, *[1] * 3072]) * 2


def archive(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


CIFAR100 = archive(**{f"cifar-100-binary/{split}.bin": RECORDS for split in ("train", "test")})
IDX = {
    f"{stem}-{kind}-ubyte.gz": gzip.compress(content)
    for stem in ("train", "t10k")
    for kind, content in {
        "images-idx3": bytes([0, 0, 8, 3, *[0, 0, 0, 2] * 3]) + bytes(8),
        "labels-idx1": bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]),
    }.items()
}


class Server:
    """Serves a folder on this machine, and records the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                server.requests.append(self.path)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve the files of two data sets, with their hashes as the published ones."""
    (tmp_path / "served").mkdir()
    for name, files in {"cifar100": {"cifar-100-binary.tar.gz": CIFAR100}, "mnist": IDX}.items():
        for file, content in files.items():
            (tmp_path / "served" / file).write_bytes(content)
        publish(monkeypatch, name, files)
    server = Server(tmp_path / "served")
    yield server
    server.http.shutdown()
    server.http.server_close()


def publish(monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
    hashes = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    published = replace(download._PUBLISHED[name], files=hashes)
    monkeypatch.setitem(download._PUBLISHED, name, published)


def test_damaged_text_is_replaced(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        f"ptb.{split}.txt": f"the {split} sat\n".encode() for split in ("train", "valid", "test")
    }
    for file, content in texts.items():
        (server.folder / file).write_bytes(content)
    publish(monkeypatch, "ptb", texts)
    source = replace(text._SOURCES["ptb"], counts=(4, 4, 4, 4))
    monkeypatch.setitem(text._SOURCES, "ptb", source)
    (tmp_path / "penn").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "penn" / f"{split}.txt").write_text("")
    fetch("PTB-mini", tmp_path, urls=server.url, progress=False)
    assert text.load("ptb", tmp_path).words == ("the", "train", "sat", "<eos>", "<unk>")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []


@pytest.mark.parametrize(("name", "shape"), [("CIFAR-100", (3, 32, 32)), ("mnist", (1, 2, 2))])
def test_downloaded_data_can_be_loaded(
    name: str, shape: tuple[int, ...], server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "not" / "yet"
    assert fetch(name, root, urls=server.url, progress=False) == root
    dataset = load(name, root)
    assert (len(dataset.train), dataset.input_shape) == (2, shape)
    assert not any("fetching" in str(path) for path in root.iterdir())


def test_progress_is_optional(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch("mnist", tmp_path / "with", urls=server.url + "/")
    assert "t10k-labels-idx1-ubyte.gz" in capsys.readouterr().out
    fetch("mnist", tmp_path / "without", urls=server.url, progress=False)
    assert capsys.readouterr().out == ""


def test_complete_data_is_not_downloaded_again(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch("cifar100", tmp_path, urls=server.url, progress=False)
    requests = list(server.requests)
    fetch("cifar100", tmp_path, urls=server.url, progress=False)
    assert capsys.readouterr().out == ""
    fetch("cifar100", tmp_path, urls=server.url)
    assert server.requests == requests
    assert capsys.readouterr().out == f"cifar100 is already there: {tmp_path}.\n"


@pytest.mark.parametrize("name", ["cifar100", "mnist"])
def test_damaged_data_is_downloaded_again_and_other_files_are_kept(
    name: str, server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    fetch(name, root, urls=server.url, progress=False)
    files = files_in(root)
    contents = [file.read_bytes() for file in files]
    files[0].write_bytes(b"short")
    files[1].unlink()
    mine = files[0].with_name("notes.txt")
    mine.write_text("mine")
    fetch(name, root, urls=server.url, progress=False)
    assert [file.read_bytes() for file in files] == contents
    assert mine.read_text() == "mine"


def assert_fetch_fails(match: str, name: str, root: Path, url: str) -> None:
    before = files_in(root)
    with pytest.raises(DataError, match=match) as error:
        fetch(name, root, urls=url, progress=False)
    assert "\n" not in str(error.value)
    assert files_in(root) == before
    assert not any("fetching" in path.name for path in root.glob("*"))


def test_wrong_hash_leaves_nothing(server: Server, tmp_path: Path) -> None:
    # The last of four files. The others are correct.
    (server.folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not what it was")
    assert_fetch_fails(
        "Cannot download mnist .* is damaged.*Nothing was kept",
        "mnist",
        tmp_path / "data",
        server.url,
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_missing_file_on_the_server_leaves_nothing(server: Server, tmp_path: Path) -> None:
    (server.folder / "t10k-labels-idx1-ubyte.gz").unlink()
    assert_fetch_fails("Cannot download .*404", "mnist", tmp_path / "data", server.url)
    gc.collect()  # pooch leaves a socket open; collect it here, where the warning is ignored


def test_no_server_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.http.server_close()
    assert_fetch_fails(
        "Cannot download cifar100 from http", "cifar100", tmp_path / "data", server.url
    )


@pytest.mark.parametrize(
    "content",
    [b"not an archive", CIFAR100[: len(CIFAR100) // 2], archive(**{"../outside": b"x"})],
    ids=["none", "half", "outside"],
)
def test_damaged_archive_leaves_nothing(
    content: bytes, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, "cifar100", {"cifar-100-binary.tar.gz": content})
    (server.folder / "cifar-100-binary.tar.gz").write_bytes(content)
    assert_fetch_fails("Cannot download cifar100", "cifar100", tmp_path / "data", server.url)
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("name", ["cifar100", "mnist"])
def test_full_disk_leaves_nothing(
    name: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Patch it in this module only: the server copies files, too.
    monkeypatch.setattr(download, "shutil", SimpleNamespace(copyfileobj=full))
    monkeypatch.setattr("tarfile.copyfileobj", full)
    assert_fetch_fails(
        "Cannot download .*No space left on device", name, tmp_path / "data", server.url
    )


def test_impossible_folder_raises(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_fetch_fails(
        "Cannot download .*Not a directory", "mnist", tmp_path / "file" / "x", server.url
    )


@pytest.mark.parametrize("package", ["pooch", "rich"])
def test_missing_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "rich.progress", raising=False)
    with pytest.raises(DataError, match=rf"^{package} is not installed\. Run `pip install 'gadam"):
        fetch("mnist", tmp_path)


@pytest.mark.parametrize("name", ["imagenet", "imagenet32"])
def test_data_that_needs_an_account_comes_with_instructions(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=f"{name} cannot be downloaded .* your own account .*{name}"
    ) as error:
        fetch(name, tmp_path)
    assert str(tmp_path / name) in str(error.value)
    assert not files_in(tmp_path)


def test_unknown_name_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Did you mean cifar10\? Texts: toy-language, ptb"):
        fetch("cifar11", tmp_path)


def test_every_published_file_has_a_hash() -> None:
    assert {*download._PUBLISHED} == {"cifar10", "cifar100", "mnist", "fashion-mnist", "ptb"}
    hashes = [known for one in download._PUBLISHED.values() for known in one.files.values()]
    assert len({*hashes}) == 13
    assert all(len(known) == 32 and int(known, 16) for known in hashes)

"""`gadam report`."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from gadam.report.figures import write_figures, write_tables
from gadam.report.page import ReportError, render
from gadam.report.records import collect
from gadam.train.record import RunError, write_atomically

__all__ = ["run", "write"]


def write(folders: list[Path], out: Path, *, figures: bool = True) -> Path:
    """Write report.html, and with it the figures and tables; gives the page's path."""
    collection = collect(folders)
    if not collection.runs and not collection.sections:
        wrong = "; ".join(collection.problems) or "there are no runs"
        raise ReportError(f"nothing to report in {', '.join(map(str, folders))}: {wrong}")
    for problem in collection.problems:
        print(f"note: {problem}", file=sys.stderr)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{out} cannot be written to: {error.strerror}") from None
    if figures and collection.runs:
        write_figures(collection, out / "figures")
        write_tables(collection, out / "figures")
    page = out / "report.html"
    write_atomically(page, render(collection).encode())
    return page


def run(arguments: list[str]) -> int:
    """Run the command. Gives its exit code."""

    def report(
        folders: tyro.conf.Positional[tuple[Path, ...]],
        out: Path | None = None,
        serve: bool = False,
        host: str = "127.0.0.1",
        port: int = 8000,
        figures: bool = True,
    ) -> tuple[tuple[Path, ...], Path | None, bool, str, int, bool]:
        """Run folders as one page that needs no network, with figures and tables beside it.

        Args:
            folders: of runs, or of whole sweeps
            out: where to write (default: the first folder)
            serve: show a sweep that runs, in a browser, instead of writing
            host: with --serve: who may look; by default only this machine
            port: with --serve; 0 is any that is free
            figures: write the figures and tables too
        """
        return folders, out, serve, host, port, figures

    folders, out, serve, host, port, figures = tyro.cli(report, prog="gadam report", args=arguments)
    try:
        if not folders:
            raise ReportError("say which folders, such as runs/compare")
        if serve:
            return _serve(list(folders), host, port)
        page = write(list(folders), out or folders[0], figures=figures)
    except (ReportError, RunError) as error:
        print(f"gadam report: {error}", file=sys.stderr)
        return 2
    print(f"The report is {page}")
    return 0


def _serve(folders: list[Path], host: str, port: int) -> int:
    from gadam.report.serve import Server

    for folder in folders:
        if not folder.is_dir():
            raise ReportError(f"{folder} is not a folder")
    try:
        server = Server(folders, host, port)
    except OSError as error:
        raise ReportError(
            f"cannot serve on {host}:{port}: {error.strerror}; say another --port"
        ) from None
    with server:
        print(f"The report is at {server.url} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0

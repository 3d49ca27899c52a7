"""The command `gadam report`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gadam.report import ReportError, write
from gadam.runs.collect import collect, not_a_folder

__all__ = ["run"]


@dataclass(frozen=True)
class _Arguments:
    """Show runs as one HTML page that needs no network, with figures and tables beside it.

    Args:
        folders: Folders of runs or of whole sweeps, searched two levels deep.
        out: Where to write.
        serve: Serve the page of a running sweep to a browser instead of writing it.
        host: With --serve, the address to listen on. The default accepts only this machine.
        port: With --serve, the port; 0 picks a free one.
        figures: Write figures and tables too.
        json: Print one JSON object per line.
    """

    folders: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="DIR [DIR ...]", help_behavior_hint="(required)"),
    ] = ()
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: the first DIR)")
    ] = None
    serve: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    host: Annotated[str, tyro.conf.arg(metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, tyro.conf.arg(metavar="PORT")] = 8000
    figures: bool = True
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


def run(arguments: list[str]) -> int:
    """Run the command.

    Args:
        arguments: The command line after `gadam report`.

    Returns:
        The exit code.

    Raises:
        UserError: The command cannot be carried out.
    """
    options = tyro.cli(_Arguments, prog="gadam report", args=arguments)
    if not options.folders:
        raise ReportError("Name at least one folder, such as runs/compare.")
    if options.serve:
        return _serve(options)
    out = options.out or options.folders[0]
    collection = collect(options.folders)
    if collection.runs and not options.json:
        print(f"Found {collection.describe()} in {', '.join(map(str, options.folders))}.")
    page = write(options.folders, out, figures=options.figures, collection=collection)
    if options.json:
        print(json.dumps({"event": "report", "page": str(page)}), flush=True)
    else:
        print(f"Report: {page}")
    return 0


def _serve(options: _Arguments) -> int:
    from gadam.report.serve import Server

    for folder in options.folders:
        if not folder.is_dir():
            raise ReportError(not_a_folder(folder))
    try:
        server = Server(options.folders, options.host, options.port)
    except OSError as error:
        raise ReportError(
            f"Cannot serve on {options.host}:{options.port}: {error.strerror}. Use a different "
            "--port."
        ) from None
    with server:
        if options.json:
            print(json.dumps({"event": "serve", "url": server.url}), flush=True)
        else:
            print(f"Serving the report at {server.url} (press Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0

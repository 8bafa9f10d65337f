"""``budgetfit cache``: location and size of the cache; clear it."""

import json

import typer

from budgetfit.cli.command import command
from budgetfit.cli.unsupported_options import Group

app = typer.Typer(
    cls=Group,
    help="Look at the cache of traces and answers, or clear it.",
    no_args_is_help=True,
)
OFF = (
    "off: BUDGETFIT_CACHE switches it off or names no folder from its root, "
    "or there is no home folder"
)


@command(app, example="cache info")
def info(*, as_json: bool) -> None:
    """Tell where traces and answers are kept and what they take."""
    from budgetfit.traces.cache.folder import LIMIT_BYTES, CacheFolder
    from budgetfit.utils.format_bytes import format_bytes

    cache = CacheFolder()
    files, size_bytes = cache.size()
    folder = str(cache.folder) if cache.folder is not None else None
    if as_json:
        answer = {
            "folder": folder,
            "files": files,
            "bytes": size_bytes,
            "limit_bytes": LIMIT_BYTES,
        }
        typer.echo(json.dumps(answer, indent=1))
        return
    typer.echo(f"folder  {folder or OFF}")
    typer.echo(f"files   {files}")
    typer.echo(f"size    {format_bytes(size_bytes)} of {format_bytes(LIMIT_BYTES)}")


@command(app, example="cache clear")
def clear(*, as_json: bool) -> None:
    """Remove them all; nothing else is touched, and plans stay what they are."""
    from budgetfit.traces.cache.folder import CacheFolder
    from budgetfit.utils.format_bytes import format_bytes

    files, size_bytes = CacheFolder().clear()
    if as_json:
        answer = {"removed_files": files, "removed_bytes": size_bytes}
        typer.echo(json.dumps(answer, indent=1))
        return
    noun = "file" if files == 1 else "files"
    typer.echo(f"removed {files} {noun}, {format_bytes(size_bytes)}")

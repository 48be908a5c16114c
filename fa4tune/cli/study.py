"""``fa4tune study``: run one of the studies that come with the source tree."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Annotated

import typer

from fa4tune.cli.common import JsonOption, emit_json, note
from fa4tune.errors import ConfigError, Fa4tuneError

FOLDER = Path(__file__).resolve().parents[2] / "studies"
"""Where the studies are if the package runs from its source tree."""


HELP_NAMES = ("--help", "-h")
"""Behind a study's name they are the study's own."""


def studies_folder() -> Path:
    """The source tree's folder, else that of the source tree in which the command is run.

    Raises:
        Fa4tuneError: neither is there: the package was installed without its source tree.
    """
    for folder in (FOLDER, Path.cwd() / "studies"):
        if folder.is_dir():
            return folder
    raise Fa4tuneError(
        "studies come with the source tree, which is not here; run this in a clone of the repository"
    )


def studies(folder: Path) -> dict[str, str]:
    """Names of the studies in ``folder`` with the first line of what each says of itself."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem.replace("_", "-")] = text.split("\n")[0]
    return found


def study(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which study; see --list.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Names and what each is about.")] = False,
    json: JsonOption = False,
) -> None:
    """Run a study with the arguments that follow its name (`--help` too), or list them."""
    if name in HELP_NAMES:
        print(context.get_help())
        return
    folder = studies_folder()
    known = studies(folder)
    if list_ or name is None:
        if json:
            emit_json({"studies": known})
            return
        for each, what in known.items():
            print(f"{each:22s} {what}")
        return
    if name not in known:
        raise ConfigError(f"study {name!r} does not exist; use one of {', '.join(known)}")
    import runpy

    path = folder / f"{name.replace('-', '_')}.py"
    note(f"running {path.name} {' '.join(context.args)}")
    sys.argv = [str(path), *context.args]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(path), run_name="__main__")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "study",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
    )(study)

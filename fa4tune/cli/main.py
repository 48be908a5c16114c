"""The ``fa4tune`` command: its verbs, each in a file of its own."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec

import typer

import fa4tune
from fa4tune.cli.common import fail
from fa4tune.errors import Fa4tuneError

VERBS = (
    "search",
    "measure",
    "explain",
    "simulate",
    "emulate",
    "calibrate",
    "table",
    "bench",
    "study",
    "worker",
)
"""Order of the help page. A verb's file is imported when it is called, or for the help page."""

app = typer.Typer(
    name="fa4tune",
    help="Predict, explain, search and run FlashAttention-4 style kernels.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"fa4tune {fa4tune.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
    ),
) -> None:
    """Predict, explain, search and run FlashAttention-4 style kernels."""


def _register(arguments: list[str]) -> None:
    """Add the verb that ``arguments`` call, or all of them where they call none (help, a typing error)."""
    called = [verb for verb in VERBS if verb in arguments[:1]]
    for verb in called or VERBS:
        if find_spec(f"fa4tune.cli.{verb}") is not None:
            import_module(f"fa4tune.cli.{verb}").register(app)
    for command in app.registered_commands:
        # the help page keeps line breaks within all but the first paragraph
        paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = command.help or "\n\n".join(p.replace("\n", " ") for p in paragraphs)


def main() -> None:
    """Run the command line; errors of this package become one sentence and an exit status."""
    _register(sys.argv[1:])
    try:
        app()
    except Fa4tuneError as error:
        fail(error)


if __name__ == "__main__":
    main()

"""The ``fa4tune`` command: its verbs, each in a file of its own."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

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

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for bad options; it has its own copy of click's, or click's itself, by its version."""

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
    """Run the command line; errors of the package and of its usage become a sentence and an exit status."""
    _register(sys.argv[1:])
    try:
        status = app(prog_name="fa4tune", standalone_mode=False)
    except Fa4tuneError as error:
        fail(error)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it has shown the help page
            error.show()
        else:
            print(f"error: {_sentence(error, sys.argv[1:])}", file=sys.stderr)
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(1) from None
    raise SystemExit(status)


def _sentence(error: Any, arguments: list[str]) -> str:
    """A mistake in the use of options in one sentence: what is wrong, the value, where to look."""
    text = " ".join(error.format_message().split()).rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for place, argument in enumerate(arguments):
            value = argument.partition("=")[2] if argument.startswith(f"{option}=") else None
            if argument == option:
                value = arguments[place + 1] if place + 1 < len(arguments) else None
            if value is not None and repr(value) not in text:
                text += f", got {value!r}"
    command = error.ctx.command_path if error.ctx is not None else "fa4tune"
    return f"{text}; see `{command} --help`"


if __name__ == "__main__":
    main()

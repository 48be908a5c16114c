"""What commands share: problem, GPU and config from options, and output on the right stream."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fa4tune.errors import ConfigError, Fa4tuneError, FileError, InfeasibleError, ProblemError
from fa4tune.problem import AttentionProblem

if TYPE_CHECKING:
    from fa4tune.hardware.gpu import Gpu
    from fa4tune.kernels.config import KernelConfig
    from fa4tune.table.store import Table

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; messages on stderr.")]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="Knobs as key=value,..., the rest at their default; or tuned."),
]
GpuOption = Annotated[str | None, typer.Option("--gpu", help="GPU by name, or a TOML file of one's own.")]
ArchOption = Annotated[
    str | None, typer.Option("--arch", help="sm_90a, sm_100a or sm_103a: its default GPU.")
]

PICTURES = (".png", ".svg", ".pdf")
"""Endings of a picture's name."""

TUNED = "tuned"
"""As ``--config``: the table's config for the problem."""

_PANEL = "Problem"
_PROBLEM = "A shape as one word, or the options below. Such as b1_hq8_hk8_sq512_sk512_d64_dv64_bf16_full_fwd"


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL)


_SHAPE: dict[str, tuple[Any, Any]] = {
    "batch": (int | None, _option("--batch", help="Sequences.")),
    "seqlen_q": (int | None, _option("--seqlen-q", help="Query rows of a sequence.")),
    "seqlen_k": (int | None, _option("--seqlen-k", help="Keys of a sequence (default: as --seqlen-q).")),
    "heads": (int | None, _option("--heads", help="Query heads.")),
    "kv_heads": (int | None, _option("--kv-heads", help="Key/value heads (default: as --heads).")),
    "head_dim": (int | None, _option("--head-dim", help="Elements of a query or key row.")),
    "head_dim_v": (
        int | None,
        _option("--head-dim-v", help="Elements of a value row (default: --head-dim)."),
    ),
    "dtype": (str | None, _option("--dtype", help="bf16 (default) or fp16.")),
    "window": (str | None, _option("--window", help="Sliding window LEFT,RIGHT around the diagonal.")),
    "direction": (str | None, _option("--direction", help="fwd (default), bwd or bwd_det.")),
    "model_config": (
        str | None,
        _option("--model-config", help="A Hugging Face config.json for heads and head dims."),
    ),
}


def with_problems(command: Callable[..., Any], unless: str | None = None) -> Callable[..., Any]:
    """Give a command the PROBLEM arguments and the shape options; it is called with ``problems``, a tuple.

    A command that takes one problem calls :func:`only` on it. ``unless`` names an own option of the command
    that makes a problem unnecessary: with it and no problem, ``problems`` is empty.
    """
    own = inspect.signature(command, eval_str=True)
    shape = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
        )
        for name, (kind, option) in _SHAPE.items()
    ]
    shape.append(
        inspect.Parameter(
            "causal",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, _option("--causal", help="Causal mask, aligned bottom-right.")],
        )
    )
    argument = inspect.Parameter(
        "problem",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None,
            typer.Argument(metavar="PROBLEM", help=_PROBLEM),
        ],
    )
    rest = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for n, p in own.parameters.items() if n != "problems"
    ]

    @wraps(command)
    def run(**values: Any) -> Any:
        given = {name: values.pop(name) for name in (*_SHAPE, "causal")}
        texts = values.pop("problem") or []
        if unless is not None and values[unless] and not texts and not any(given.values()):
            return command(problems=(), **values)
        return command(problems=resolve_problems(texts, **given), **values)

    signature = inspect.Signature([argument, *rest, *shape])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def resolve_problems(texts: list[str], **given: Any) -> tuple[AttentionProblem, ...]:
    """Problems from PROBLEM strings, or one from shape options.

    Raises:
        ProblemError: neither or both were given, an option is missing, or a value is out of range.
    """
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    if texts and options:
        names = ", ".join("--" + name.replace("_", "-") for name in options)
        raise ProblemError(f"both a PROBLEM and {names} were given; use one or the other")
    if texts:
        return tuple(AttentionProblem.parse(text) for text in texts)
    if not options:
        raise ProblemError(
            "no problem was given; write a PROBLEM string or --batch --seqlen-q --heads --head-dim"
        )
    if path := options.pop("model_config", None):
        options = {**_model_shape(Path(path), "causal" in options or "window" in options), **options}
    missing = [name for name in ("batch", "seqlen_q", "heads", "head_dim") if name not in options]
    if missing:
        raise ProblemError(
            f"the problem lacks {', '.join('--' + m.replace('_', '-') for m in missing)}; add them"
        )
    if "window" in options and options.get("causal"):
        raise ProblemError("--causal and --window exclude each other; a causal window is --window LEFT,0")
    mask = "causal" if options.pop("causal", False) else "full"
    if window := options.pop("window", None):
        left, comma, right = window.partition(",")
        if not (comma and left.strip().isdigit() and right.strip().isdigit()):
            raise ProblemError(f"--window {window!r} is not LEFT,RIGHT; give two whole numbers such as 512,0")
        mask = f"win{int(left)}-{int(right)}"
    options.setdefault("seqlen_k", options["seqlen_q"])
    options.setdefault("kv_heads", options["heads"])
    options.setdefault("head_dim_v", options["head_dim"])
    return (AttentionProblem(mask=mask, **options),)


def _model_shape(path: Path, masked: bool) -> dict[str, Any]:
    """Heads, head dims and dtype of a Hugging Face ``config.json``; causal where it is a ``ForCausalLM``."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProblemError(
            f"--model-config {str(path)!r} cannot be read ({reason}); give a config.json"
        ) from None
    if isinstance(config, dict):
        config = config.get("text_config", config)
    if not isinstance(config, dict):
        raise ProblemError(f"--model-config {str(path)!r} holds no JSON object; give a config.json")

    def number(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = f"{name}={value!r}" if name in config else f"no {name}"
            raise ProblemError(f"{str(path)!r} has {found}; give --heads and --head-dim instead")
        return value

    heads = number("num_attention_heads")
    shape: dict[str, Any] = {"heads": heads, "kv_heads": config.get("num_key_value_heads") or heads}
    if "qk_rope_head_dim" in config:  # multi-head latent attention, as trained (not absorbed)
        shape["head_dim"] = number("qk_nope_head_dim") + number("qk_rope_head_dim")
        shape["head_dim_v"] = number("v_head_dim")
        shape["kv_heads"] = heads
    else:
        shape["head_dim"] = config.get("head_dim") or number("hidden_size") // heads
    if config.get("torch_dtype", config.get("dtype")) == "float16":
        shape["dtype"] = "fp16"
    if not masked and any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ()):
        shape["causal"] = True
    return shape


def only(problems: tuple[AttentionProblem, ...]) -> AttentionProblem:
    """The one problem of a command that takes one.

    Raises:
        ProblemError: several were given.
    """
    if len(problems) != 1:
        raise ProblemError(f"this command takes one problem, got {len(problems)}; run it once for each")
    return problems[0]


def choose_config(
    problem: AttentionProblem, gpu: Gpu, text: str | None, table: Table | None = None
) -> KernelConfig:
    """The config that ``--config`` means.

    That is the class's default with the knobs of ``key=value,...`` changed; ``default`` changes none, and
    ``tuned`` is what ``table`` (without one the user's, then the packaged ones) has for the problem.

    Raises:
        ConfigError: unknown knob, a value out of range, or ``tuned`` and the table has none.
    """
    from fa4tune.kernels.config import default_config

    if text == TUNED:
        from fa4tune.table.store import Table

        hit = (table or Table()).lookup(problem, gpu)
        if hit is None:
            raise ConfigError(
                f"no table has an entry for {problem} on {gpu.name}; search it first with "
                f"`fa4tune search`, or give --config KEY=VALUE,..."
            )
        return hit.entry.kernel_config()
    config = default_config(problem, gpu.arch)
    if text is None or text == "default":
        return config
    if not text.strip():
        raise ConfigError("--config '' names no knob; write for example tile_n=96, or leave it out")
    return config.with_text(text)


def require_writable(file: Path) -> None:
    """Find out before the work whether a file can be written where it is wanted.

    Raises:
        FileError: its directory does not exist or must not be written to, or it is a directory itself.
    """
    if not file.parent.is_dir():
        raise FileError(f"directory {str(file.parent)!r} of {str(file)!r} does not exist; make it first")
    if file.is_dir():
        raise FileError(f"{str(file)!r} is a directory; name a file in it")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise FileError(f"{str(file)!r} cannot be written (no permission); write somewhere else")


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Around the writing of a file: what the operating system says against it in one sentence.

    Raises:
        FileError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FileError(f"{str(file)!r} cannot be written ({reason}); write somewhere else") from None


def require_picture(plot: Path) -> None:
    """The same as :func:`require_writable` for the picture of ``--plot``.

    Raises:
        ConfigError: no picture's name, or nothing to draw with.
        FileError: it cannot be written.
    """
    if plot.suffix not in PICTURES:
        raise ConfigError(f"--plot {str(plot)!r} is no picture's name; end it in {', '.join(PICTURES)}")
    require_writable(plot)
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed; pip install matplotlib")


def emit_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def note(text: str) -> None:
    """A message for the person at the terminal: stderr, so that stdout stays clean."""
    print(text, file=sys.stderr)


def fail(error: Fa4tuneError) -> NoReturn:
    """End with the error's sentence on stderr.

    Status 2 where what was given is at fault (a name, a value, a file, a config that cannot run), 1 where
    what was asked for did not come out well.
    """
    text = str(error)
    if isinstance(error, InfeasibleError):  # a config is long: what is wrong with it comes first
        text = f"{'; '.join(error.reasons)} (so this cannot run: {error.subject})"
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2 if isinstance(error, ValueError | InfeasibleError) else 1)

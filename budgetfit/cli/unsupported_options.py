"""Command and group classes of the app: plain help, hints for unsupported options."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from budgetfit.cli.output import json_writer, report_errors
from budgetfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of click, or of the copy of it in newer versions of typer.
_UsageError: Any = typer.BadParameter.__base__
_Context: TypeAlias = Any

_SEVERAL_GPUS: Final = (
    "use --gpus 8 of plan or estimate, or --gpus 8x4 for 4 nodes with 8 each; --engine "
    "ddp, fsdp2 or deepspeed"
)
_SHARDED: Final = (
    "use --gpus with --engine fsdp2, which shards what ZeRO-3 shards, or --engine "
    "deepspeed, zero1, zero2, zero3; tensor, context and pipeline parallelism are not "
    "planned"
)
_COMPILED: Final = (
    "use plan --compile blocks (torch.compile for each block), --compile model, or "
    "--compile auto, which takes the better of none and blocks"
)

# Options of other tools that users try, and what to do instead.
UNSUPPORTED_OPTIONS: Final = {
    "--num-gpus": _SEVERAL_GPUS,
    "--n-gpus": _SEVERAL_GPUS,
    "--devices": _SEVERAL_GPUS,
    "--ddp": _SEVERAL_GPUS,
    "--fsdp": _SHARDED,
    "--deepspeed": _SHARDED,
    "--zero": _SHARDED,
    "--tensor-parallel": _SHARDED,
    "--torch-compile": _COMPILED,
    "--seq-len": "use --max-length, the tokens in one sample: --max-length 2048",
    "--seq-length": "use --max-length, the tokens in one sample: --max-length 2048",
    "--max-seq-length": "use --max-length, the tokens in one sample: --max-length 2048",
    "--lora": "use --method lora, and --lora-r for the rank",
    "--qlora": "use --method qlora, and --lora-r for the rank",
    "--load-in-4bit": "use --method qlora; --quantization nf4 is its default",
    "--load-in-8bit": "use --method qlora --quantization int8",
    "--dtype": "use --precision: bf16-mixed, bf16, fp16-mixed, fp32 or tf32",
    "--bf16": "use --precision bf16-mixed (autocast) or bf16 (weights too)",
    "--fp16": "use --precision fp16-mixed",
    "--optim": "use --optimizer, which takes the same names",
    "--gradient-checkpointing": "use --checkpointing full, or auto to choose by block",
    "--attn-implementation": "attention is planned as the model runs it, sdpa where it "
    'has it. For another, write "_attn_implementation": "eager" into config.json, or '
    "build the model with it in file.py:factory",
}


class Command(TyperCommand):
    """A command with hints for options that it does not have."""

    def parse_args(self, ctx: _Context, args: list[str]) -> list[str]:
        """Parse; refuse unsupported options with a hint."""
        own = {word for param in self.get_params(ctx) for word in param.opts}
        asked = (word.partition("=")[0].replace("_", "-") for word in args)
        for word in asked:
            instead = UNSUPPORTED_OPTIONS.get(word)
            if instead is not None and word not in own:
                with report_errors(as_json="--json" in args, traceback=False):
                    raise InputError(f"{word}: {instead}.")
        return super().parse_args(ctx, args)

    def get_params(self, ctx: _Context) -> list[Any]:
        """Return the parameters, without ``<bool>`` after flags in the help."""
        return _plain(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: _Context) -> list[str]:
        """Return the pieces of the usage line, without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """A group of commands; usage errors are documents where ``--json`` is asked for."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: _Context | None = None,
        **extra: object,
    ) -> _Context:
        """Parse what stands before a command."""
        as_json = parent is None and "--json" in args  # of groups inside: once
        with _usage_error_document(as_json=as_json):
            ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta.setdefault(__name__, as_json)  # shared with contexts inside
        return ctx

    def invoke(self, ctx: _Context) -> object:
        """Parse and run the command."""
        as_json = ctx.parent is None and ctx.meta[__name__]
        with _usage_error_document(as_json=as_json):
            return super().invoke(ctx)

    def get_params(self, ctx: _Context) -> list[Any]:
        """Return the parameters, without ``<bool>`` after flags in the help."""
        return _plain(super().get_params(ctx))


@contextlib.contextmanager
def _usage_error_document(*, as_json: bool) -> Iterator[None]:
    """Print a usage error on stdout as other errors are; typer's text is on stderr."""
    try:
        yield
    except _UsageError as error:
        if as_json:
            path = error.ctx.command_path if error.ctx is not None else "budgetfit"
            said = error.format_message().rstrip(".")
            told = InputError(f"{said}. Use {path} --help to see what there is.")
            typer.echo(json_writer().error_json(told))
        raise


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params

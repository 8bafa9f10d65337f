"""``budgetfit layers`` and ``budgetfit gpus``: the tables."""

import typer

from budgetfit.cli import options
from budgetfit.cli.early_checks import check_early
from budgetfit.cli.output import answering, api, in_json, in_text, working
from budgetfit.cli.parsing import read_dims


def layers(  # noqa: PLR0913 - what a batch is made of
    model: options.Model,
    *,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    text_only: options.TextOnly = False,
    batch: options.Batch = None,
    batch_dims: options.BatchDims = None,
    loss: options.Loss = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """List what each layer takes under each precision."""
    with answering(as_json=as_json, traceback=traceback):
        check_early(model)
        with working() as progress:
            rows = api().layers(
                model,
                max_length=max_length,
                image_size=image_size,
                text_only=text_only,
                batch=batch,
                batch_dims=read_dims(batch_dims),
                loss=loss,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        if as_json:
            typer.echo(in_json().layers_json(rows))
        else:
            in_text().show(in_text().layers_text(rows), width=in_text().WIDE)


def gpus(
    *, as_json: options.AsJson = False, traceback: options.Traceback = False
) -> None:
    """List the cards that --gpu knows."""
    with answering(as_json=as_json, traceback=traceback):
        from budgetfit.gpus.table import all_gpus  # noqa: PLC0415 - keeps --help fast

        if as_json:
            typer.echo(in_json().gpus_json(all_gpus()))
        else:
            in_text().show(in_text().gpus_text(all_gpus()), width=in_text().WIDE)

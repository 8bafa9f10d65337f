"""``budgetfit compare``: which card do I need."""

import typer

from budgetfit import cli_options as options
from budgetfit.cli_answers import (
    answering,
    api,
    exit_unless_fits,
    in_json,
    in_text,
    working,
)
from budgetfit.cli_early import check_early
from budgetfit.cli_input import name_or_blocks, names, one_or_list, read_lengths


def compare(  # noqa: PLR0913 - the arguments of budgetfit.plan
    model: options.Model,
    *,
    gpus: options.Gpus,
    headroom: options.Headroom = None,
    host_ram: options.HostRam = None,
    max_length: options.MaxLength = None,
    lengths: options.Lengths = None,
    batch_size: options.BatchSize = None,
    effective_batch_size: options.EffectiveBatchSize = None,
    precision: options.Precision = "auto",
    optimizer: options.Optimizer = "adamw_torch_fused",
    checkpointing: options.Checkpointing = "auto",
    objective: options.Objective = "throughput",
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Tell which card you need: the best settings on each."""
    with answering(as_json=as_json, traceback=traceback):
        check_early(
            model,
            gpus=names(gpus),
            headroom=headroom,
            precision=one_or_list(precision),
            objective=objective,
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
        )
        with working() as progress:
            rows, summary = api().compare(
                model,
                names(gpus),
                max_length=max_length,
                lengths=read_lengths(lengths),
                precision=one_or_list(precision),
                optimizer=optimizer,
                batch_size=batch_size,
                effective_batch_size=effective_batch_size,
                checkpointing=name_or_blocks(checkpointing),
                objective=objective,
                headroom=headroom,
                host_ram=host_ram,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        if as_json:
            typer.echo(in_json().compare_json(rows))
        else:
            in_text().show(in_text().compare_text(rows, summary))
        exit_unless_fits(fits=any(row.fits for row in rows))

"""``budgetfit compare``: compare GPUs and training methods."""

import typer

from budgetfit.cli import options
from budgetfit.cli.early_checks import check_before_torch_import
from budgetfit.cli.output import (
    api,
    exit_unless_fits,
    json_writer,
    report_errors,
    show_progress,
    text_writer,
)
from budgetfit.cli.parsing import (
    one_or_list,
    parse_batch_dims,
    policy_or_blocks,
    read_lengths,
    split_names,
)
from budgetfit.core.validation import check_samples


def compare(  # noqa: PLR0913 - the arguments of budgetfit.plan
    model: options.Model,
    *,
    gpus: options.Gpus,
    headroom: options.Headroom = None,
    host_ram: options.HostRam = None,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    text_only: options.TextOnly = False,
    batch: options.Batch = None,
    batch_dims: options.BatchDims = None,
    loss: options.Loss = None,
    lengths: options.Lengths = None,
    batch_size: options.BatchSize = None,
    effective_batch_size: options.EffectiveBatchSize = None,
    precision: options.Precision = "auto",
    optimizer: options.Optimizer = "adamw_torch_fused",
    checkpointing: options.Checkpointing = "auto",
    objective: options.Objective = "throughput",
    methods: options.Methods = None,
    method: options.Method = None,
    lora_r: options.LoraR = 16,
    lora_alpha: options.LoraAlpha = 32,
    lora_dropout: options.LoraDropout = 0.0,
    target_modules: options.TargetModules = "all-linear",
    quantization: options.Quantization = None,
    double_quantization: options.DoubleQuantization = True,
    prepare_for_kbit: options.PrepareForKbit = True,
    trust_remote_code: options.TrustRemoteCode = False,
    samples: options.Samples = None,
    as_json: options.AsJson = False,
    traceback: options.Traceback = False,
) -> None:
    """Tell which card or method you need: the best settings on each."""
    with report_errors(as_json=as_json, traceback=traceback):
        check_before_torch_import(
            model,
            gpus=split_names(gpus),
            headroom=headroom,
            precision=one_or_list(precision),
            objective=objective,
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
        )
        check_samples(samples)
        with show_progress() as progress:
            rows, summary = api().compare(
                model,
                split_names(gpus),
                max_length=max_length,
                image_size=image_size,
                text_only=text_only,
                batch=batch,
                batch_dims=parse_batch_dims(batch_dims),
                loss=loss,
                lengths=read_lengths(lengths),
                precision=one_or_list(precision),
                optimizer=optimizer,
                batch_size=batch_size,
                effective_batch_size=effective_batch_size,
                checkpointing=policy_or_blocks(checkpointing),
                objective=objective,
                headroom=headroom,
                host_ram=host_ram,
                methods=None if methods is None else split_names(methods),
                method=method,
                lora_r=lora_r,
                lora_alpha=lora_alpha,
                lora_dropout=lora_dropout,
                target_modules=one_or_list(target_modules),
                quantization=quantization,
                double_quantization=double_quantization,
                prepare_for_kbit=prepare_for_kbit,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        if as_json:
            typer.echo(json_writer().compare_json(rows, samples))
        else:
            wide = text_writer().WIDE if methods or samples else text_writer().WIDTH
            text = text_writer().compare_text(rows, summary, samples)
            text_writer().show(text, width=wide)
        exit_unless_fits(fits=any(row.fits for row in rows))

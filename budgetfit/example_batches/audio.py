"""Example audio inputs: waveforms or log-mel spectrograms, transcripts and labels."""

from typing import Any

import torch
from torch import Tensor, nn

from budgetfit.errors import InputError
from budgetfit.example_batches.request import BatchRequest, forward_arguments
from budgetfit.example_batches.token_ids import (
    first_field,
    random_token_ids,
    text_inputs,
    text_length,
)

_SECONDS = 10  # about the mean of LibriSpeech's training utterances (12.3 s)
_SAMPLES_PER_S = 16_000  # what every speech model of transformers is trained on
_FRAMES_PER_S = 100  # spectrogram columns every 10 ms
_DEFAULT_MELS = 80
_FUSED_VIEWS = 4  # the whole sound and three parts of it, as CLAP's processor makes
_MASKED_SPANS = 0.065  # wav2vec 2.0: part of the frames at which a masked span begins
_SPAN_FRAMES = 10
_TRANSCRIPT_TOKENS = 128  # about 13 characters a second
# Of sound, as ``get_encoder`` of transformers looks for it.
_ENCODERS = ("audio_tower", "audio_encoder", "speech_encoder", "encoder")


def waveforms(request: BatchRequest, config: object) -> Tensor:
    """Return waveforms ``[batch, samples]``; spectrograms for models with patches.

    Codecs, which encode and decode, take ``[batch, channels, samples]``.
    """
    mels = first_field(config, "num_mel_bins")
    columns = first_field(config, "max_length")
    if mels is not None and columns is not None:
        request.notes.append(f"spectrograms of {columns} columns and {mels} mel bins")
        return request.floats((request.batch_size, columns, mels))
    if all(callable(getattr(request.model, x, None)) for x in ("encode", "decode")):
        return codec_waveforms(request, config)
    request.notes.append(f"sound of {_SECONDS} s at {_SAMPLES_PER_S // 1000} kHz")
    return request.floats((request.batch_size, _SECONDS * _SAMPLES_PER_S))


def codec_waveforms(request: BatchRequest, config: object) -> Tensor:
    """Return waveforms ``[batch, channels, samples]`` at the codec's own rate."""
    rate = first_field(config, "sampling_rate") or _SAMPLES_PER_S
    channels = first_field(config, "audio_channels") or 1
    request.notes.append(f"sound of {_SECONDS} s at {rate / 1000:g} kHz")
    return request.floats((request.batch_size, channels, _SECONDS * rate))


def spectrograms(request: BatchRequest, config: object) -> Tensor:
    """Return mel spectrograms in the layout that the model takes.

    Whisper-like models take exactly ``[batch, mels, 2 * max_source_positions]``, others
    ``[batch, columns, mels]`` of any length; CLAP-like ones, which fold a spectrogram
    into an image of ``spec_size``, ``[batch, 1, columns, mels]``.
    """
    encoder = first_field(config, "audio_config", "encoder_config", "audio_encoder")
    encoder = encoder or config
    per_column = first_field(
        encoder, "input_feat_per_channel", "feature_projection_input_dim"
    )
    positions = first_field(encoder, "max_source_positions")
    named = per_column or first_field(encoder, "num_mel_bins")
    mels = named or _DEFAULT_MELS
    if per_column is None and positions is not None:
        columns = 2 * positions
        request.notes.append(f"spectrograms of {mels} mel bins and {columns} columns")
        return request.floats((request.batch_size, mels, columns))
    columns = _SECONDS * _FRAMES_PER_S
    folded = first_field(encoder, "spec_size")
    if folded is not None:
        columns = min(columns, folded * (folded // mels))
        request.notes.append(f"spectrograms of {columns} columns and {mels} mel bins")
        views = _FUSED_VIEWS if first_field(encoder, "enable_fusion") else 1
        return request.floats((request.batch_size, views, columns, mels))
    width = _first_linear_width(request.model)
    if width and (named is None or width % mels == 0):
        mels = width
    request.notes.append(f"spectrograms of {columns} columns and {mels} mel bins")
    return request.floats((request.batch_size, columns, mels))


def streamed_inputs(request: BatchRequest) -> dict[str, Tensor]:
    """Return a text and its sound, each token with its columns (Voxtral Realtime)."""
    config: Any = request.model.config
    ids = text_inputs(request)["input_ids"]
    mels = config.audio_config.num_mel_bins
    columns = ids.shape[1] * config.audio_length_per_tok
    request.notes.append(f"spectrograms of {mels} mel bins and {columns} columns")
    sound = request.floats((request.batch_size, mels, columns))
    return {"input_ids": ids, "input_features": sound}


def _first_linear_width(model: Any) -> int:
    """Return what the first layer of a sound's encoder reads, if it is linear; else 0.

    It may read several columns at once, or features that the config does not name.
    """
    homes = (model, getattr(model, "base_model", model))
    encoder = next((e for each in homes if (e := first_field(each, *_ENCODERS))), model)
    if encoder is model and "input_ids" in forward_arguments(model)[0]:
        return 0  # its first layer may read text
    if any(isinstance(each, (nn.Conv1d, nn.Conv2d)) for each in encoder.children()):
        return 0  # it may stand behind the other layers
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d)
    first = next((each for each in encoder.modules() if isinstance(each, layers)), None)
    return first.in_features if isinstance(first, nn.Linear) else 0


def ctc_labels(request: BatchRequest, sound: Tensor) -> Tensor:
    """Return CTC labels, int64 ``[batch, tokens]``: at least two frames per token.

    Raises:
        InputError: The sound is too short for ``max_length`` tokens.
    """
    most = max(1, _frames(request, sound) // 2)
    _check_length(request, most, f"hears at most {most} tokens in {_SECONDS} s")
    length = min(request.max_length or _TRANSCRIPT_TOKENS, most)
    request.notes.append(f"transcripts of {length} tokens")
    return random_token_ids(request, length)


def transducer_targets(request: BatchRequest, sound: Tensor) -> tuple[Tensor, Tensor]:
    """Return a transducer's labels and what its decoder reads: a blank and those."""
    labels = ctc_labels(request, sound)
    config: Any = request.model.config
    blank = labels.new_full((len(labels), 1), config.blank_token_id)
    return labels, torch.cat([blank, labels], dim=1)


def spoken_targets(request: BatchRequest, ids: Tensor) -> dict[str, Tensor]:
    """Return what a text is spoken as: a spectrogram, and what is predicted with it.

    Of FastSpeech 2 duration, pitch and energy of each token: all are spoken as long.
    """
    takes, _ = forward_arguments(request.model)
    whole: Any = request.model.config
    config = first_field(whole, "model_config") or whole
    mels = first_field(config, "num_mel_bins") or _DEFAULT_MELS
    columns = _SECONDS * _FRAMES_PER_S
    if "duration_labels" in takes:
        each = max(1, columns // ids.shape[1])
        columns = each * ids.shape[1]
        name = "spectrogram_labels"
        others = {
            "duration_labels": torch.full_like(ids, each),
            "pitch_labels": request.floats((*ids.shape, 1)),
            "energy_labels": request.floats((*ids.shape, 1)),
        }
    else:
        name = "labels"
        columns -= columns % (first_field(config, "reduction_factor") or 1)
        speaker = (request.batch_size, first_field(config, "speaker_embedding_dim"))
        others = {"speaker_embeddings": request.floats(speaker)}
    request.notes.append(f"spectrograms of {columns} columns and {mels} mel bins")
    spectrogram = request.floats((request.batch_size, columns, mels))
    mask = request.ones(ids.shape)  # the loss of SpeechT5's attention reads it
    return {name: spectrogram, "attention_mask": mask, **others}


def contrastive_targets(request: BatchRequest, sound: Tensor) -> dict[str, Tensor]:
    """Return what wav2vec 2.0's data collator adds for its contrastive loss.

    ``mask_time_indices``, bool ``[batch, frames]``, and ``sampled_negative_indices``,
    int64 ``[batch, frames, negatives]``: rows of all samples' frames.
    """
    frames = _frames(request, sound)
    spans = max(1, int(frames * _MASKED_SPANS))
    begins = request.integers((request.batch_size, spans), 0, frames - _SPAN_FRAMES)
    masked = begins[..., None] + torch.arange(_SPAN_FRAMES, device="cpu")
    mask = torch.zeros(request.batch_size, frames, dtype=torch.bool, device="cpu")
    mask.scatter_(1, masked.flatten(1).clamp(0, frames - 1), value=True)
    negatives = first_field(request.model.config, "num_negatives")
    # The first sample's frames are there in batches of any size.
    sampled = request.integers((request.batch_size, frames, negatives), 0, frames)
    request.notes.append(f"masked frames, {negatives} negative samples for each")
    return {"mask_time_indices": mask, "sampled_negative_indices": sampled}


def transcripts(request: BatchRequest, config: object) -> Tensor:
    """Return labels of a speech-to-text decoder, int64 ``[batch, tokens]``.

    Raises:
        InputError: It has fewer positions than ``max_length``.
    """
    decoder = first_field(config, "decoder", "decoder_config", "text_config") or config
    limit = first_field(decoder, "max_target_positions")
    if limit is None:
        return random_token_ids(request, text_length(request, decoder))
    _check_length(request, limit, f"has {limit} positions for transcripts")
    length = request.max_length or limit
    request.notes.append(f"transcripts of {length} tokens; max_length= changes it")
    return random_token_ids(request, length)


def _check_length(request: BatchRequest, most: int, reason: str) -> None:
    if (request.max_length or 0) > most:
        raise InputError(
            f"max_length {request.max_length} is too long: "
            f"{type(request.model).__name__} {reason}. Use max_length={most} or less."
        )


def frame_labels(request: BatchRequest, config: object, sound: Tensor) -> Tensor:
    """Return multi-hot labels per frame, float ``[batch, frames, classes]``."""
    shape = (
        request.batch_size,
        _frames(request, sound),
        first_field(config, "num_labels"),
    )
    return request.integers(shape, 0, 2).to(torch.float32)


def _frames(request: BatchRequest, sound: Tensor) -> int:
    """Return the number of frames after the feature encoder."""
    samples = torch.tensor([sound.shape[1]], device="cpu")
    for name in ("_get_feat_extract_output_lengths", "_get_subsampling_output_length"):
        count = getattr(request.model, name, None)
        if callable(count):
            return int(count(samples)[0])
    return sound.shape[1] // 8

"""Example audio inputs: waveforms or log-mel spectrograms, transcripts and labels."""

import torch
from torch import Tensor

from budgetfit.errors import InputError
from budgetfit.example_batches.request import BatchRequest
from budgetfit.example_batches.token_ids import (
    first_field,
    random_token_ids,
    text_length,
)

_SECONDS = 10  # about the mean of LibriSpeech's training utterances (12.3 s)
_SAMPLES_PER_S = 16_000  # what every speech model of transformers is trained on
_FRAMES_PER_S = 100  # spectrogram columns every 10 ms
_DEFAULT_MELS = 80
_TRANSCRIPT_TOKENS = 128  # about 13 characters a second


def waveforms(request: BatchRequest, config: object) -> Tensor:
    """Return waveforms ``[batch, samples]``; spectrograms for models with patches."""
    mels = first_field(config, "num_mel_bins")
    columns = first_field(config, "max_length")
    if mels is not None and columns is not None:
        request.notes.append(f"spectrograms of {columns} columns and {mels} mel bins")
        return request.floats((request.batch_size, columns, mels))
    request.notes.append(f"sound of {_SECONDS} s at {_SAMPLES_PER_S // 1000} kHz")
    return request.floats((request.batch_size, _SECONDS * _SAMPLES_PER_S))


def spectrograms(request: BatchRequest, config: object) -> Tensor:
    """Return mel spectrograms in the layout that the model takes.

    Whisper-like models take exactly ``[batch, mels, 2 * max_source_positions]``, others
    ``[batch, columns, mels]`` of any length.
    """
    encoder = first_field(config, "audio_config", "encoder_config", "audio_encoder")
    encoder = encoder or config
    per_column = first_field(
        encoder, "input_feat_per_channel", "feature_projection_input_dim"
    )
    positions = first_field(encoder, "max_source_positions")
    mels = per_column or first_field(encoder, "num_mel_bins") or _DEFAULT_MELS
    if per_column is None and positions is not None:
        columns = 2 * positions
        request.notes.append(f"spectrograms of {mels} mel bins and {columns} columns")
        return request.floats((request.batch_size, mels, columns))
    columns = _SECONDS * _FRAMES_PER_S
    request.notes.append(f"spectrograms of {columns} columns and {mels} mel bins")
    return request.floats((request.batch_size, columns, mels))


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


def transcripts(request: BatchRequest, config: object) -> Tensor:
    """Return labels of a speech-to-text decoder, int64 ``[batch, tokens]``.

    Raises:
        InputError: It has fewer positions than ``max_length``.
    """
    decoder = first_field(config, "decoder", "text_config") or config
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

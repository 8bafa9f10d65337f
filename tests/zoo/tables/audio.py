"""Stock models of speech and other sound."""

from typing import Any

from tests.zoo.shrink import small_entries

Models = dict[str, dict[str, Any]]

# Few frames of the ten seconds that a made batch has.
_WAVES: dict[str, Any] = {
    "conv_dim": [16] * 7,
    "conv_stride": [20, 4, 4, 2, 2, 2, 2],
    "num_conv_pos_embeddings": 8,
}
_WITH_WAVES = ("Wav2Vec2", "WavLM", "UniSpeechSat", "Data2VecAudio", "Hubert")
_SEW = {"conv_stride": [20, 1, 4, 1, 4, 1, 1, 1, 1, 2, 1, 2, 1]}
_COLUMNS = {"max_source_positions": 50}
_TOKENS = {"vocab_size": 64}


def _waves(head: str, *names: str) -> Models:
    return {f"{name}{head}": _WAVES for name in names}


CTC: Models = {
    **_waves("ForCTC", "Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat"),
    "Data2VecAudioForCTC": _WAVES,
    "Wav2Vec2ConformerForCTC": _WAVES | _TOKENS,
    "Wav2Vec2BertForCTC": _TOKENS,
    "SEWForCTC": _SEW,
    "SEWDForCTC": _SEW,
    "ParakeetForCTC": {},
    "LasrForCTC": {},
}
SPEECH_TO_TEXT: Models = {
    "WhisperForConditionalGeneration": _COLUMNS,
    "Speech2TextForConditionalGeneration": {},
    "SeamlessM4TForSpeechToText": {},
    "SpeechT5ForSpeechToText": _WAVES,
    "CohereAsrForConditionalGeneration": {},
    "MoonshineForConditionalGeneration": {"pad_token_id": 0},
}
CLASSIFICATION: Models = {
    **_waves("ForSequenceClassification", *_WITH_WAVES, "UniSpeech"),
    "Wav2Vec2ConformerForSequenceClassification": _WAVES,
    "Wav2Vec2BertForSequenceClassification": {},
    "SEWForSequenceClassification": _SEW,
    "SEWDForSequenceClassification": _SEW,
    "ASTForAudioClassification": {"max_length": 128},
    "WhisperForAudioClassification": _COLUMNS,
}
SPEAKERS: Models = {
    **_waves("ForXVector", "Wav2Vec2", "WavLM", "UniSpeechSat", "Data2VecAudio"),
    "Wav2Vec2ConformerForXVector": _WAVES,
    "Wav2Vec2BertForXVector": {},
}
FRAMES: Models = {
    **_waves("ForAudioFrameClassification", "Wav2Vec2", "WavLM", "UniSpeechSat"),
    "Data2VecAudioForAudioFrameClassification": _WAVES,
    "Wav2Vec2ConformerForAudioFrameClassification": _WAVES,
    "Wav2Vec2BertForAudioFrameClassification": {},
}

ENTRIES = [
    *small_entries("speech recognition (CTC)", CTC),
    *small_entries("speech to text", SPEECH_TO_TEXT),
    *small_entries("audio classification", CLASSIFICATION),
    *small_entries("speaker recognition", SPEAKERS),
    *small_entries("audio frame classification", FRAMES),
]

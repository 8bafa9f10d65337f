"""Stock models of time series, proteins, decisions and bytes."""

from typing import Any

from tests.zoo.shrink import small_entries

Models = dict[str, dict[str, Any]]
_AHEAD = {"prediction_length": 12}
_PROTEIN = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}
_LATENTS = {
    "d_latents": 64,
    "d_model": 64,
    "num_latents": 16,
    "num_self_attends_per_block": 2,
}


def _plain(names: str) -> Models:
    return {name: {} for name in names.split()}


SERIES: Models = {
    "TimeSeriesTransformerForPrediction": _AHEAD,
    "InformerForPrediction": _AHEAD,
    "AutoformerForPrediction": _AHEAD,
    "PatchTSTForClassification": {"num_targets": 3},
    **_plain(
        "PatchTSTForPrediction PatchTSTForPretraining "
        "PatchTSTForRegression PatchTSMixerForPrediction PatchTSMixerForPretraining "
        "PatchTSMixerForTimeSeriesClassification PatchTSMixerForRegression "
        "TimesFmModelForPrediction"
    ),
}
PROTEINS: Models = {
    "EsmForMaskedLM": _PROTEIN,
    "EsmForSequenceClassification": _PROTEIN,
    "EsmForTokenClassification": _PROTEIN,
}
OTHERS: Models = {
    "DecisionTransformerModel": {},
    "PerceiverForMaskedLM": _LATENTS,
    "PerceiverForSequenceClassification": _LATENTS,
}

ENTRIES = [
    *small_entries("time series", SERIES),
    *small_entries("proteins", PROTEINS),
    *small_entries("decisions and bytes", OTHERS),
]

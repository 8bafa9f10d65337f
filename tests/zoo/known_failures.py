"""Entries that are known not to work, by name, each with the reason.

``test_zoo`` fails for a name that works again, so that it leaves ``KNOWN_FAILURES``.
"""

from typing import Final

KNOWN_FAILURES: dict[str, str] = {
    "xLSTMForCausalLM": (
        "does not train without its own library: its backward pass finds states that "
        "were overwritten, in plain PyTorch too"
    )
}

# With each block compiled: why -> names.
NOT_COMPILED: Final[dict[str, set[str]]] = {
    "between two graphs they ask for values, which are not known while they compile": {
        *("AutoformerForPrediction", "ConditionalDetrForObjectDetection"),
        *("DbrxForCausalLM", "DeformableDetrForObjectDetection"),
        *("DetrForObjectDetection", "HiDreamImageTransformer2DModel"),
        *("IBertForMaskedLM", "JetMoeForCausalLM", "LEDForConditionalGeneration"),
        *("LEDForQuestionAnswering", "LongcatFlashForCausalLM"),
        *("LongformerForMaskedLM", "LongformerForSequenceClassification"),
        "RTDetrV2ForObjectDetection",
        *("MochiTransformer3DModel", "OpenAIPrivacyFilterForTokenClassification"),
        *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        *("Qwen3VLForConditionalGeneration", "Qwen4ExpForCausalLM"),
        *("SwitchTransformersForConditionalGeneration", "XmodForCausalLM"),
        *("XmodForMaskedLM", "XmodForMultipleChoice", "user's packed sequences"),
    },
    "more than two minutes of processor time": {
        *("Kandinsky3UNet", "UNetSpatioTemporalConditionModel")
    },
    "asks for CUDA's generators in its blocks": {
        *("ReformerForMaskedLM", "ReformerForSequenceClassification"),
        "ReformerModelWithLMHead",
    },
    "recurrent layers and what else torch.compile finds nothing to compile in": {
        *("torch GRU classifier of tokens", "torch LSTM classifier of tokens"),
        *("torch CTCLoss", "torch Linear layers behind a Flatten"),
        *("user's cell in a loop", "user's control flow on shapes"),
    },
    "torch's compiled code refuses a second backward pass through it": {
        *("user's functional call with moved weights", "user's gradient penalty")
    },
    "not looked into": {
        *("Mamba2ForCausalLM", "torch activations"),
        *("user's blocks that write to their input",),
        *("user's buffers updated in forward",),
    },
}

# Nothing of them is compiled.
WITHOUT_BLOCKS: Final = {
    *("torch Bilinear", "torch ConvTranspose1d", "torch ConvTranspose3d"),
    *("torch Embedding", "torch EmbeddingBag", "torch GRU", "torch GRUCell"),
    *("torch LSTM", "torch LSTM with projections", "torch LSTM, batch first"),
    *("torch LSTMCell", "torch LayerNorm", "torch Linear", "torch RNN"),
    *("torch MultiheadAttention", "torch MultiheadAttention with kdim and vdim"),
    *("torch RNNCell", "user's modules in a plain list"),
    "user's tied autoencoder",
}

"""Vision, speech, encoders and own modules: fp32 4 bytes, AdamW 8 per parameter."""

from tests.situations.case import Case
from tests.situations.expectation import Fits, OneLine, Refused

CASES = (
    Case(
        "vit-t4",
        "plan vit-base-patch16-224 --gpu t4 --effective-batch-size 256",
        Fits(
            0.322,
            0.645,
            (1.29, 14.44),
            recipe={"precision": "fp16-mixed"},
            effective=256,
        ),
        "86.57 M parameters: 0.32 and 0.64.",
    ),
    Case(
        "convnext-t4",
        "plan convnext-base-224 --gpu t4 --effective-batch-size 256",
        Fits(0.330, 0.660, (1.32, 14.44), effective=256),
        "88.59 M parameters: 0.33 and 0.66.",
        40,
    ),
    Case(
        "whisper-small-t4",
        "plan whisper-small --gpu t4 --effective-batch-size 16",
        Fits(0.9005, 1.801, (3.60, 14.44), effective=16),
        "241.7 M parameters: 0.90 and 1.80.",
        25,
    ),
    Case(
        "whisper-large-4090",
        "plan whisper-large-v3 --gpu rtx-4090 --effective-batch-size 16",
        Refused(
            floor_gib=23.0,
            known_gib=28.16,
            suggests=("adamw_bnb_8bit", 'method="lora"'),
        ),
        "1.5435 B x 16 bytes = 23.00 GiB, 22.90 are usable. 8-bit AdamW is known to "
        "do with 19.12.",
        60,
    ),
    Case(
        "bert-t4",
        "plan bert-base-uncased --gpu t4 --max-length 128 --effective-batch-size 32",
        Fits(0.408, 0.816, (1.63, 14.44), recipe={"batch_size": 32}, effective=32),
        "109.5 M parameters: 0.41 and 0.82. 32 rows of 128 tokens have logits of 32 x "
        "128 x 30522 x 4 bytes = 0.47 GiB: everything fits at once.",
        15,
    ),
    Case(
        "deberta-t4",
        "plan deberta-v3-base --gpu t4 --max-length 256 --effective-batch-size 32",
        Fits(0.687, 1.374, (2.75, 14.44), effective=32),
        "184.4 M parameters: 0.69 and 1.37.",
        70,
    ),
    Case(
        "modernbert-t4",
        "plan ModernBERT-base --gpu t4 --max-length 512 --effective-batch-size 32",
        Fits(0.5575, 1.115, (2.23, 14.44), effective=32),
        "149.7 M parameters: 0.56 and 1.12.",
        25,
    ),
    Case(
        "segformer-t4",
        "plan segformer-b2-ade-512 --gpu t4 --effective-batch-size 16",
        Fits(0.1023, 0.2046, (0.41, 14.44), effective=16),
        "27.46 M parameters: 0.10 and 0.20.",
        60,
    ),
    Case(
        "dinov2-t4",
        "plan dinov2-base --gpu t4 --effective-batch-size 64",
        Fits(0.3225, 0.645, (1.29, 14.44), effective=64, says=("mean",)),
        "86.58 M parameters: 0.32 and 0.65. It has no loss, and the answer says what "
        "was taken for one.",
        15,
    ),
    Case(
        "own-blocks",
        "plan modules:blocks --gpu rtx-4090",
        Fits(1.370, 2.741, (5.48, 22.90), says=("mean", "128")),
        "24 blocks of 12 x 1024^2 + 13 x 1024 and two tables of 32000 x 1024: 367.8 M "
        "parameters: 1.37 and 2.74. The length and the loss that it took are said.",
        15,
    ),
    Case(
        "own-cnn",
        "plan modules:cnn --gpu t4 --effective-batch-size 64",
        Fits(0.0994, 0.1988, (0.40, 14.44), effective=64),
        "26.69 M parameters: 0.10 and 0.20.",
        10,
    ),
    Case(
        "own-argument",
        "plan modules:blocks_of --gpu t4",
        OneLine(says=("blocks_of", "layers")),
        "The factory needs an argument that nobody gives.",
        4,
    ),
    Case(
        "own-missing",
        "plan modules:block --gpu t4",
        OneLine(says=("has no block", "blocks")),
        "No such factory: the answer names the nearest.",
        4,
    ),
    Case(
        "unet-4090",
        "python unet",
        Fits(0.977, 1.955, (3.91, 22.90), effective=32),
        "262.4 M parameters: 0.98 and 1.95. Batch and loss are handed in.",
        60,
    ),
    Case(
        "dit-4090",
        "python dit",
        Fits(1.940, 3.880, (7.76, 22.90), effective=32),
        "520.7 M parameters: 1.94 and 3.88. Batch and loss are handed in.",
        30,
    ),
    Case(
        "dit-command-line",
        "plan modules:dit --gpu rtx-4090 --effective-batch-size 32 "
        "--batch tests/situations/modules.py:dit_batch "
        "--loss tests/situations/modules.py:noise_loss",
        Fits(1.940, 3.880, (7.76, 22.90), effective=32),
        "As dit-4090, without Python.",
        30,
    ),
    Case(
        "dit-no-batch",
        "plan modules:dit --gpu rtx-4090",
        OneLine(says=("batch",)),
        "A forward of two tensors says nothing of their shapes: a batch is asked for.",
        5,
    ),
)

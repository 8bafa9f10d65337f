"""Record what PyTorch's CUDA build makes of texts for ``PYTORCH_ALLOC_CONF``.

    python -m tests.accuracy.nulldriver.run --gpu rtx-4090 -- \
        python tests/core/record_allocator_settings.py

Needs PyTorch with CUDA, alone. ``recorded_allocator_settings.json`` then has each
text with the settings that PyTorch names afterwards, or null if it refused the text.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch

FILE: Final = Path(__file__).with_name("recorded_allocator_settings.json")
NAMED: Final = (
    "expandable_segments",
    "garbage_collection_threshold",
    "max_split_size",
    "roundup_power2_divisions",
)
NUMBERS = (
    "0",
    "1",
    "7",
    "8",
    "10",
    "11",
    "19",
    "20",
    "21",
    "64",
    "128abc",
    "-1",
    "+32",
)
ODD_NUMBERS = ("12.7", "99999999999999999999", "x", "", "[", "True", "1e3", "0.5", ".5")
FLAGS = ("True", "False", "true", "1", "")
SIZES = ("large_segment_size_mb", "max_split_size_mb", "max_non_split_rounding_mb")
OTHER_NUMBERS = (
    *("pinned_max_cached_size_mb", "pinned_max_round_threshold_mb"),
    *("pinned_num_register_threads", "pinned_reserve_segment_size_mb"),
    *("garbage_collection_threshold", "per_process_memory_fraction"),
    "roundup_power2_divisions",
)
SWITCHES = (
    *("expandable_segments", "graph_capture_record_stream_reuse"),
    *("pinned_free_catch_all", "pinned_use_background_threads"),
    *("pinned_use_cuda_host_register", "release_lock_on_cudamalloc"),
    *("release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"),
)
LISTS = (
    *("[256:1,512:2,1024:4,>:8]", "[>:4]", "[64:8,128:2,>:1]", "[1:8,2:2]", "[]"),
    *("[256:0,512:2]", "[131072:4]", "[300:1]", "[256:3]", "[256:1", "[256:1,512:2,]"),
    *("[8:2,4:4]", "[2:2,>:4,64:8]", "[256]", "[256:]", "[:4]", "[a:4]", "[1:2:4:8]"),
)
TEXTS = (
    *(
        "",
        " ",
        ",",
        "a",
        "a:1",
        "a,,b:1",
        "expandable_segments",
        "expandable_segments:",
    ),
    *(
        "expandable_segments=True",
        "expandable_segments: True",
        "expandable_segments,True",
    ),
    "expandable_segments:True:max_split_size_mb:64",
    " max_split_size_mb : 128 ,expandable_segments:True,",
    "max_split_size_mb:64,,expandable_segments:True",
    "max_split_size_mb:30,large_segment_size_mb:32",
    "max_split_size_mb:32,large_segment_size_mb:32,max_non_split_rounding_mb:31",
    "max_split_size_mb:64,max_split_size_mb:96",
    "backend:native,expandable_segments:True",
    "backend:malloc",
    "roundup_power2_divisions:[16:4,>:2],max_split_size_mb:64",
    "roundup_power2_divisions:4,garbage_collection_threshold:0.8",
    *(f"roundup_power2_divisions:{each}" for each in LISTS),
    *(f"{key}:{number}" for key in SIZES for number in (*NUMBERS, *ODD_NUMBERS)),
    *(f"{key}:{n}" for key in OTHER_NUMBERS for n in (*NUMBERS, *ODD_NUMBERS)),
    *(f"{key}:{value}" for key in SWITCHES for value in FLAGS),
)
DEFAULTS: Final = "large_segment_size_mb:20,expandable_segments:False"


def main() -> None:
    torch.cuda.init()
    torch.cuda.mem_get_info(0)
    rows: dict[str, Any] = {}
    for text in TEXTS:
        torch._C._accelerator_setAllocatorSettings(DEFAULTS)
        try:
            torch._C._accelerator_setAllocatorSettings(text)
        except (RuntimeError, ValueError, IndexError):
            rows[text] = None
            continue
        said = torch.cuda.memory._snapshot()["allocator_settings"]
        rows[text] = [said[name] for name in NAMED]
        rows[text][-1] = list(said[NAMED[-1]].values())
    lines = (
        f"{json.dumps(t)}:{json.dumps(r).replace(' ', '')}" for t, r in rows.items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

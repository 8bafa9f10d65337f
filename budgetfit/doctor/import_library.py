"""Import one library and print facts about it as JSON; run as a subprocess.

A broken library may print, exit or crash without ending ``budgetfit doctor``. This file
imports nothing of budgetfit, so that it starts fast.
"""

import contextlib
import importlib
import importlib.util
import json
import sys
import types
from typing import Any

MARK = "budgetfit-probe:"


def torch_facts() -> dict[str, Any]:
    """Return the fields of ``TorchFacts``, as far as torch provides them."""
    torch = importlib.import_module("torch")
    found: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
        "available": torch.cuda.is_available(),
    }
    with contextlib.suppress(Exception):
        # get_arch_list() is empty without a GPU; this one is of the build.
        found["architectures"] = str(torch._C._cuda_getArchFlags()).split()  # noqa: SLF001
    with contextlib.suppress(Exception):
        found["tf32"] = bool(torch.backends.cuda.matmul.allow_tf32)
    if found["available"]:
        with contextlib.suppress(Exception):
            found["says_bf16"] = bool(torch.cuda.is_bf16_supported())
    return found


def bitsandbytes_facts() -> dict[str, Any]:
    """Return why bitsandbytes' native library was not loaded; empty if it was."""
    # Only that part is imported: the rest compiles for seconds and hides the error.
    name = "bitsandbytes"
    spec = importlib.util.find_spec(name)
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    sys.modules[name] = package
    try:
        library = importlib.import_module("bitsandbytes.cextension").lib
    except (ImportError, AttributeError):  # other versions have another layout
        del sys.modules[name]
        importlib.import_module(name)
        return {"error": ""}
    if "ErrorHandler" in type(library).__name__:
        text = str(getattr(library, "error_msg", "") or "its library is missing")
        return {"error": " ".join(text.split())[:300]}
    return {"error": ""}


def library_facts(name: str) -> dict[str, Any]:
    """Import a library; return facts about it, or its error."""
    functions = {"torch": torch_facts, "bitsandbytes": bitsandbytes_facts}
    try:
        if name in functions:
            return functions[name]()
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - any error is the finding
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"[:400]}
    return {"error": ""}


if __name__ == "__main__":
    print(f"\n{MARK}{json.dumps(library_facts(sys.argv[1]))}")  # noqa: T201 - its output

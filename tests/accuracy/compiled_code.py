"""Is the code that inductor generates here, without CUDA, that of a CUDA build?

Of each compiled case, the lines of the generated wrappers that allocate, reuse, free or
return memory, or call a library, are compared: those of a CUDA build on the null driver
with those that a prediction runs.

    python -m tests.accuracy.compiled_code --null-driver FOLDER NAME...

The folder is that of the null driver's environment; a name may be a pattern. Cases
whose graphs differ are printed first.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from tests.accuracy.cases import CASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.accuracy.case import Case

_ROOT: Final = Path(__file__).parents[2]
_MEMORY: Final = re.compile(
    r"empty_strided|reinterpret_tensor|^del |^return|# reuse|"
    r"extern_kernels\.|torch\.ops\."
)
# They allocate nothing for aligned inputs; the hashes of kernels are in no such line.
_IGNORED: Final = re.compile(r"copy_if_misaligned|assert_|benchmark|rand_strided")
_BODY: Final = re.compile(
    r"^def (?:call|partition_\d+)\(|^    def call\(", re.MULTILINE
)
_INPUTS: Final = re.compile(r"^ *(.+?) = args$", re.MULTILINE)


def memory_lines(code: str) -> tuple[str, ...]:
    """Return the lines of generated code that decide about memory, in order.

    Inputs are named in the order of their first use: torch numbers what the backward
    pass is given by views in the traced forward, which move no bytes.

    >>> memory_lines("def call(args):\\n    view_6, = args\\n    del view_6\\n")
    ('del input_0',)
    """
    begins = _BODY.search(code)
    body = code[begins.start() :] if begins else code
    body = body.split("def benchmark_compiled_module")[0].split("def get_args()")[0]
    found = (line.split("  #")[0].strip() for line in body.splitlines())
    lines = [x for x in found if _MEMORY.search(x) and not _IGNORED.search(x)]
    given = _INPUTS.search(body)
    inputs = set(re.findall(r"\w+", given[1])) if given else set()
    names: dict[str, str] = {}

    def renamed(word: re.Match[str]) -> str:
        if word[0] not in inputs:
            return word[0]
        return names.setdefault(word[0], f"input_{len(names)}")

    return tuple(re.sub(r"\w+", renamed, line) for line in lines)


def generated_on_the_null_driver(
    case: Case, environment: Path
) -> list[tuple[str, ...]]:
    """Return the memory lines of each graph of a CUDA build."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        start = [sys.executable, "-m", "tests.accuracy.nulldriver.run"]
        start += ["--environment", str(environment.resolve()), "--gpu", case.gpu]
        start += ["--", "env", f"TORCHINDUCTOR_CACHE_DIR={folder}/cache"]
        start += ["python", "-m", "tests.accuracy.compiled_code", "--write", str(out)]
        subprocess.run([*start, case.name], cwd=_ROOT, check=True, capture_output=True)
        return [tuple(lines) for lines in json.loads(out.read_text())]


def write_generated(case: Case, path: Path) -> None:
    """Train a case with a CUDA build, and write the memory lines of its graphs.

    Triton compiles nothing: which kernel runs is in no line, and what it would write is
    not looked at.
    """
    from contextlib import nullcontext

    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    from tests.accuracy.measure import choose_cudnn, notes_before
    from tests.accuracy.provenance import weights_as_they_are
    from tests.accuracy.training import Training, allowed_attention

    choose_cudnn(enabled=False)
    notes_before(case)
    found: list[str] = []
    hook: Any = GraphLowering
    hook.save_output_code = found.append
    with weights_as_they_are():
        training = Training(case)
    kernel = SimpleNamespace(run=lambda *_, **__: None)
    with (
        mock.patch.object(AsyncCompile, "triton", return_value=kernel),
        allowed_attention(case),
    ):
        training.compile()
        training.step(lambda *_: nullcontext(), case.batch_size)
    path.write_text(json.dumps([memory_lines(code) for code in found]))


def generated_here(case: Case) -> list[tuple[str, ...]]:
    """Return the memory lines of each graph that a prediction runs."""
    from budgetfit.traces.session import TraceSession
    from budgetfit.tracing.compiled import cuda_backend
    from tests.accuracy import predict

    found: list[str] = []
    module_on_fakes = cuda_backend.module_on_fakes

    def noting(code: str, on_call: Any) -> Any:
        found.append(code)
        return module_on_fakes(code, on_call)

    workload = predict.subject_of(case, cudnn=False)
    session = TraceSession(workload)
    recipe = predict.recipe_of(case, workload, predict.segments_of(case, workload))
    with (
        mock.patch.object(cuda_backend, "module_on_fakes", noting),
        predict.cudnn_attention(enabled=False),
        predict.allowed_attention(case),
    ):
        program = session._program(recipe)
        session.tracer.trace(program, case.batch_size)
    return [memory_lines(code) for code in found]


def equal_graphs(
    ours: Iterable[Sequence[str]], theirs: Iterable[Sequence[str]]
) -> tuple[int, int]:
    """Return how many of their graphs are among ours, and how many they are.

    >>> equal_graphs([("a",), ("b",)], [("a",), ("c",)])
    (1, 2)
    """
    wanted = Counter(map(tuple, theirs))
    return (wanted & Counter(map(tuple, ours))).total(), wanted.total()


def main() -> int:
    """Compare the cases that the patterns on the command line name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="+", metavar="NAME")
    parser.add_argument("--null-driver", type=Path, help="its environment's folder")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES.values()
        if case.compile
        and any(fnmatch.fnmatchcase(case.name, each) for each in options.patterns)
    ]
    if not chosen:
        parser.error("no compiled case has such a name")
    if options.write:
        write_generated(chosen[0], options.write)
        return 0
    if options.null_driver is None:
        parser.error("--null-driver is needed: where the CUDA build is")
    rows = []
    for case in chosen:
        theirs = generated_on_the_null_driver(case, options.null_driver)
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # as theirs
            ours = fresh.submit(generated_here, case).result()
        equal, graphs = equal_graphs(ours, theirs)
        rows.append((equal - graphs, case.name, equal, graphs))
        sys.stdout.write(f"{equal} of {graphs} graphs equal: {case.name}\n")
        sys.stdout.flush()
    equal, graphs = (sum(row[at] for row in rows) for at in (2, 3))
    sys.stdout.write("\nThose with differences first:\n")
    for _, name, same, all_of_it in sorted(rows):
        sys.stdout.write(f"  {same} of {all_of_it}  {name}\n")
    sys.stdout.write(
        f"{equal} of {graphs} graphs of {len(rows)} cases ({equal / graphs:.1%}) have "
        "the memory lines of the CUDA build\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

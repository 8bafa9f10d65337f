"""What is built, from what a wheel imports; no wheel is needed for that."""

import re
from pathlib import Path

import pytest

import budgetfit
from tests.accuracy.nulldriver import build as builder
from tests.accuracy.nulldriver import wheel as wheels
from tests.accuracy.nulldriver.build import (
    DRIVER,
    FINGERPRINT,
    MANAGEMENT,
    PRELOADED,
    SOURCES,
    archs_in_c,
    fingerprint,
    is_built,
    stubs_in_c,
    wanted_of,
)
from tests.accuracy.nulldriver.wheel import Wheel, archs_in, symbols_in

NM_OUTPUT = """
libtorch_cuda.so:
                 U cudaMalloc@libcudart.so.13
                 U cudaMemsetAsync@libcudart.so.13
                 U __cudaRegisterVar@libcudart.so.13
                 U cublasSgemm_v2@libcublas.so.13
                 U cudnnCreate
                 U malloc@GLIBC_2.2.5
                 w __cxa_finalize@GLIBC_2.2.5

libcaffe2_nvrtc.so:
                 U cuModuleLoadData
"""
STRINGS = b"\0\x01cuMemCreate\0nvmlInit_v2\0cuFileRead\0not a name nvmlInit_v2\0"
HEADER = "CUresult cuMemMap(void);\n#define cuMemFree cuMemFree_v2\n"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel of which only what the builder reads exists."""
    for path, content in (
        ("torch/lib/libc10_cuda.so", STRINGS),
        ("nvidia/cu13/include/cuda_runtime_api.h", b""),
        ("nvidia/cu13/include/cuda.h", HEADER.encode()),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    monkeypatch.setattr(wheels, "undefined_symbols", lambda _: symbols_in(NM_OUTPUT))
    return Wheel(
        packages=tmp_path, torch="2.13.0+cu130", cuda="13.0", compiled_archs=(75, 90)
    )


def test_each_library_gets_the_symbols_of_its_own_interface(wheel: Wheel) -> None:
    assert wanted_of(wheel) == {
        PRELOADED: {
            "cudaMalloc",
            "cudaMemsetAsync",
            "__cudaRegisterVar",
            "cublasSgemm_v2",
        },
        DRIVER: {
            "cuModuleLoadData",  # imported
            "cuMemCreate",  # looked up by name
            "cuMemMap",  # declared
            "cuMemFree",
            "cuMemFree_v2",
        },
        MANAGEMENT: {"nvmlInit_v2"},
    }


def test_a_stub_returns_success_and_what_is_not_imitated_an_error() -> None:
    missing = {"cudaMemset", "cudaStreamBeginCapture", "cudaIpcGetMemHandle"}
    assert stubs_in_c(missing, 0) == (
        "long cudaIpcGetMemHandle(void) { return 801; }\n"
        "long cudaMemset(void) { return 0; }\n"
        "long cudaStreamBeginCapture(void) { return 801; }\n"
    )
    assert stubs_in_c({"nvmlShutdown"}, 3) == "long nvmlShutdown(void) { return 3; }\n"
    assert stubs_in_c(set(), 0) == ""


def test_compiled_architectures_become_a_table_in_c() -> None:
    archs = archs_in("sm_75 sm_120 sm_90 sm_90a compute_120")
    assert archs == (75, 90, 120)
    assert archs_in_c(archs) == "static const int COMPILED_ARCHS[] = {75, 90, 120};\n"


def test_libraries_count_as_built_until_a_source_changes(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.c").write_text("int one;", encoding="utf-8")
    monkeypatch.setattr(builder, "SOURCES", sources)
    assert not is_built(wheel, tmp_path)
    (tmp_path / FINGERPRINT).write_text(fingerprint(wheel), encoding="utf-8")
    assert is_built(wheel, tmp_path)
    (sources / "one.c").write_text("int two;", encoding="utf-8")
    assert not is_built(wheel, tmp_path)


def test_every_source_file_belongs_to_exactly_one_library() -> None:
    named = [
        source
        for library in (PRELOADED, DRIVER, MANAGEMENT)
        for source in library.sources
    ]
    assert sorted(named) == sorted(path.name for path in SOURCES.glob("*.c"))


def test_no_two_source_files_define_the_same_function() -> None:
    definition = re.compile(
        r"^(?!static|extern|#)[\w* ]*?\b(\w+)\([^;]*\{", re.MULTILINE
    )
    defined = [
        name
        for path in SOURCES.glob("*.c")
        for name in definition.findall(path.read_text("utf-8"))
    ]
    assert "cudaMalloc" in defined
    assert len(defined) == len(set(defined))


def test_the_product_knows_nothing_of_the_null_driver() -> None:
    package = Path(budgetfit.__file__).parent
    knowing = [
        path.name
        for path in package.rglob("*.py")
        if re.search("null_?driver|nullcuda", path.read_text("utf-8"), re.IGNORECASE)
    ]
    assert knowing == []

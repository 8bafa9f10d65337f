import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetfit.errors import InputError
from budgetfit.explain.explain import explain
from budgetfit.reporting.layout import render
from budgetfit.reporting.render import explain_text
from tests.explain import messages

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (messages.TORCH_2_1, "fragmentation"),
        (messages.TORCH_2_9, "other processes"),
        (messages.LIMITED, "limit of the process"),
        (messages.ONE_TENSOR, "one tensor larger than the card"),
        (messages.EXABYTE, "one tensor larger than the card"),
        (messages.PAGED, "driver pages to host memory"),
        (messages.TORCH_1_0, "more free than asked for"),
        (messages.FULL, "the model and its batch"),
        (messages.TORCH_2_13, "the model and its batch"),
        (messages.DRIVER, "outside the allocator"),
        (messages.LIBRARY, "outside the allocator"),
        (messages.HOST, "host memory"),
    ],
)
def test_the_cause_is_what_the_numbers_show(text: str, cause: str) -> None:
    assert explain(text).cause == cause


def test_fragmentation_is_the_first_thing_to_change_where_it_is_enough() -> None:
    found = explain(messages.TORCH_2_1)
    # 10.08 GiB asked for, 687.12 MiB free: the 10.61 GiB that idle would have done.
    assert found.missing_bytes == round(10.08 * GIB) - round(687.12 * MIB)
    first = found.advice[0]
    assert "expandable_segments:True" in first.commands[0]
    assert first.gain_bytes == round(10.61 * GIB)
    assert first.enough
    assert not any(advice.enough for advice in found.advice[1:])


def test_fragmentation_comes_last_where_it_is_not_enough() -> None:
    found = explain(
        messages.TORCH_2_9.replace("321.37 MiB is res", "200.00 MiB is res")
    )
    assert "Process" in found.advice[0].text
    assert found.advice[0].enough
    assert "segments" in found.advice[-1].text


def test_bare_contexts_of_other_ranks_are_recognised() -> None:
    found = explain(messages.TORCH_2_9)
    assert "set_device(local_rank)" in found.advice[0].text
    assert found.advice[0].commands[0] == "ps -fp 3721648,1374765,1374763,1374764"


def test_the_next_plan_is_for_what_this_process_can_have() -> None:
    # 39.49 GiB less four processes of 414 MiB and the 101 MiB that nobody named.
    assert explain(messages.TORCH_2_9).commands[0] == (
        "budgetfit plan MODEL --vram 37.77GiB"
    )
    assert explain(messages.FULL).commands[0] == "budgetfit plan MODEL --vram 31.37GiB"
    # The limit is the allocator's, and the context comes on top.
    size = re.search(r"([\d.]+)GiB", explain(messages.LIMITED).commands[0])
    assert size is not None
    assert 11.82 <= float(size[1]) < 13


@pytest.mark.parametrize("text", messages.WITH_NUMBERS)
def test_the_parts_are_the_whole_card(text: str) -> None:
    found = explain(text)
    total = found.message.total_bytes
    assert total is not None
    parts = sum(part.bytes for part in found.parts)
    if found.cause == "driver pages to host memory":
        assert parts > total
    else:  # every number of the message is rounded to 0.01 GiB
        assert parts == pytest.approx(total, abs=64 * MIB)
    assert all(part.bytes >= 0 for part in found.parts)


def test_a_context_is_estimated_where_the_driver_does_not_tell() -> None:
    names = {part.name: part for part in explain(messages.TORCH_1_5).parts}
    # 15.90 - 14.80 - 0.41 GiB are left for the context and for others.
    assert "CUDA context" in names
    assert "estimated" in names["CUDA context"].meaning


@pytest.mark.parametrize("text", messages.ALL)
def test_every_message_gets_advice_with_commands_that_can_be_copied(text: str) -> None:
    found = explain(text)
    report = render(explain_text(found))
    assert "WHY" in report
    assert "WHAT TO CHANGE" in report
    assert any(advice.commands for advice in found.advice)
    for advice in found.advice:
        assert re.search(r"[.!]$", advice.text), advice.text
        for command in advice.commands:
            assert command in report, "a command must not be cut or broken"
    assert all(command in report for command in found.commands)
    assert max(map(len, report.splitlines())) <= 80


def test_the_last_message_with_numbers_is_explained() -> None:
    found = explain(f"{messages.TORCH_1_0}\n{messages.FULL}\n{messages.LIBRARY}")
    assert found.messages == 3
    assert found.message.total_bytes == round(31.37 * GIB)
    assert "has 3 messages" in render(explain_text(found))


@pytest.mark.parametrize("text", ["", "hello", "AssertionError: shape mismatch"])
def test_a_text_without_a_message_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"No out-of-memory message .* Tried to alloc"):
        explain(text)


@given(st.text(max_size=300), st.sampled_from(messages.ALL), st.text(max_size=300))
def test_whatever_surrounds_a_message_it_is_explained(
    before: str, message: str, after: str
) -> None:
    render(explain_text(explain(f"{before}\n{message}\n{after}")))


@given(
    requested=st.integers(0, 100_000),
    total=st.integers(1, 100_000),
    free=st.integers(0, 100_000),
    allocated=st.integers(0, 100_000),
    idle=st.integers(0, 100_000),
)
def test_no_numbers_break_the_explanation(**sizes: int) -> None:
    mib = {name: f"{size}.00 MiB" for name, size in sizes.items()}
    text = (
        f"CUDA out of memory. Tried to allocate {mib['requested']}. GPU 0 has a total "
        f"capacity of {mib['total']} of which {mib['free']} is free. Of the allocated "
        f"memory {mib['allocated']} is allocated by PyTorch, and {mib['idle']} is "
        "reserved by PyTorch but unallocated."
    )
    found = explain(text)
    assert found.advice
    assert all(part.bytes >= 0 for part in found.parts)
    assert found.missing_bytes is None or found.missing_bytes >= 0

"""Fakes that are made at once are those that torch makes."""

import pytest
import torch
from torch import nn

from budgetfit.tracing.fake.model_copy import fake_copy, fake_mode
from budgetfit.tracing.fake.tensor_factory import FakeTensorFactory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_an_empty_fake_is_torchs(dtype: torch.dtype) -> None:
    with fake_mode() as mode:
        fakes = FakeTensorFactory(mode)
        assert fakes.fast_path
        own = fakes.empty((3, 4), (1, 3), dtype)
        torchs = torch.empty_strided((3, 4), (1, 3), dtype=dtype)
    assert type(own) is type(torchs)
    assert vars(own) == vars(torchs)
    assert own.stride() == torchs.stride()
    assert own.untyped_storage().nbytes() == torchs.untyped_storage().nbytes()
    assert torch._C._dispatch_key_set(own) == torch._C._dispatch_key_set(torchs)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_is_a_leaf_like_any(trained: bool) -> None:
    like = nn.Parameter(torch.empty(4, 3).t(), requires_grad=trained)
    with fake_mode() as mode:
        own = FakeTensorFactory(mode).parameter(like)
        torchs = nn.Parameter(
            torch.empty_strided((3, 4), (1, 3)), requires_grad=trained
        )
        assert isinstance(own, nn.Parameter)
        assert own.is_leaf
        assert not own._is_view()
        assert own.requires_grad == trained
        assert (own.shape, own.stride()) == (like.shape, like.stride())
        assert vars(own) == vars(torchs)
        assert own._version == torchs._version


def test_a_view_shares_its_storage_and_counts_no_write() -> None:
    with fake_mode() as mode:
        fakes = FakeTensorFactory(mode)
        whole = fakes.empty((12,), (1,), torch.float32)
        part = fakes.view(whole, (2, 3), (3, 1), 6, torch.float32)
    assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert (part.shape, part.stride(), part.storage_offset()) == ((2, 3), (3, 1), 6)
    assert part._version == whole._version == 0


def test_a_copy_keeps_ties_and_has_every_tensor_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.one.weight
            self.listed = [self.one.weight]
            self.register_buffer("table", torch.ones(3))
            self.plain = self.table

    model = Tied()
    with fake_mode() as mode:
        copied = fake_copy(model, mode)
    assert copied.one.weight is copied.other.weight
    assert copied.listed[0] is copied.one.weight
    assert copied.plain is copied.table
    assert isinstance(copied.one.weight, nn.Parameter)
    assert copied.one.weight.requires_grad
    assert not isinstance(copied.table, nn.Parameter)
    assert len(list(copied.parameters())) == 3

import pytest
import torch
from torch import Tensor, nn

from budgetfit.batches.batch_tree import Batch, describe_batch
from budgetfit.errors import InputError
from budgetfit.example_batches.make_batch import make_batch
from budgetfit.example_batches.plain_modules import batch_dimension


class NanoGPT(nn.Module):
    """As in the well-known script: targets beside the tokens, a tuple as answer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 8)
        self.wpe = nn.Embedding(24, 8)
        self.head = nn.Linear(8, 50)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        positions = torch.arange(idx.shape[1])
        logits = self.head(self.wte(idx) + self.wpe(positions))
        return logits, nn.functional.cross_entropy(logits.mT, targets)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.layer(query) + key


class Declares(nn.Module):
    """A module whose attributes say what it reads."""

    def __init__(self, **declared: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x


def run(model: nn.Module, batch: Batch) -> Batch:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (nn.Linear(16, 4), (2, 16), "float32"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (2, 784), "float32"),
        (nn.Embedding(50, 8), (2, 128), "int64"),
        (nn.EmbeddingBag(50, 8), (2, 128), "int64"),
        (nn.Conv2d(4, 8, 3), (2, 4, 224, 224), "float32"),
        (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 224, 224), "float32"),
        (nn.Conv1d(1, 8, 3), (2, 1, 16000), "float32"),
        (nn.Conv1d(6, 8, 3), (2, 6, 1024), "float32"),
        (nn.Conv3d(3, 2, 3), (2, 3, 16, 112, 112), "float32"),
        (nn.LayerNorm((7, 5)), (2, 7, 5), "float32"),
        (nn.RMSNorm(5), (2, 5), "float32"),
        (nn.BatchNorm1d(5), (2, 5), "float32"),
        (nn.BatchNorm2d(5), (2, 5, 224, 224), "float32"),
        (nn.GroupNorm(1, 5), (2, 5), "float32"),
        (nn.InstanceNorm1d(5, affine=True), (2, 5, 128), "float32"),
        (nn.PReLU(5), (2, 5), "float32"),
        (nn.ConvTranspose2d(5, 2, 4), (2, 5, 1, 1), "float32"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(5, 2)), (2, 5), "float32"),
        (nn.GRUCell(5, 6), (2, 5), "float32"),
        (nn.LSTM(5, 6, batch_first=True), (2, 128, 5), "float32"),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True), (2, 128, 8), "float32"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_the_first_layer_with_parameters_fixes_the_shape(
    model: nn.Module, shape: tuple[int, ...], dtype: str
) -> None:
    made = make_batch(model)
    assert describe_batch(made.batch) == {"batch": (shape, dtype)}
    run(model, made.batch)


class Flattened(nn.Module):
    """A Linear behind a flatten takes one size alone."""

    def __init__(self, first: nn.Module, features: int) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).flatten(1))


class Patches(nn.Module):
    """Patches, a class token, and positions for all of them."""

    def __init__(self, side: int, **declared: object) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 7, 7)
        self.pos_embed = nn.Parameter(torch.zeros(1, side * side + 1, 4))
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        return torch.cat([x[:, :1], x], 1) + self.pos_embed


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Flattened(nn.Conv2d(1, 2, 5), 2 * 24 * 24), (2, 1, 28, 28)),
        (Flattened(nn.Conv1d(3, 2, 1), 2 * 100), (2, 3, 100)),
        (Flattened(nn.Embedding(9, 4), 4 * 11), (2, 11)),
        (Flattened(nn.Linear(4, 3), 3 * 128), (2, 128, 4)),
        (Patches(9), (2, 3, 63, 63)),
    ],
    ids=["image", "signal", "tokens", "positions", "patches"],
)
def test_what_the_forward_refuses_is_not_made(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    made = make_batch(model)
    assert made.batch.shape == shape
    run(model, made.batch)


def test_the_size_that_an_attribute_names_comes_before_others() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3))
    model.img_size = (90, 60)
    assert make_batch(model).batch.shape == (2, 3, 90, 60)
    model.img_size = "large"
    assert make_batch(model).batch.shape == (2, 3, 224, 224)


def test_a_layer_that_is_registered_before_the_first_to_run_is_passed_over() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.stem = nn.Linear(4, 2), nn.Conv2d(3, 4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x).mean((2, 3)))

    made = make_batch(Backwards())
    assert made.batch.shape == (2, 3, 224, 224)
    assert made.notes == (
        "input [2, 3, 224, 224], from the first layer, stem (Conv2d)",
    )


def test_two_inputs_of_a_bilinear_layer_have_its_widths() -> None:
    model = nn.Bilinear(3, 4, 2)
    made = make_batch(model)
    assert [tensor.shape for tensor in made.batch] == [(2, 3), (2, 4)]
    run(model, made.batch)


def test_trying_shapes_changes_neither_model_nor_random_state() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Dropout())
    state, mean = torch.random.get_rng_state(), model[1].running_mean.clone()
    make_batch(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model[1].running_mean, mean)


def test_the_notes_name_the_layer_that_was_read() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    assert make_batch(model).notes == (
        "input [2, 784], from the first layer, 1 (Linear)",
    )


def test_token_tables_behind_modules_with_parameters_of_their_own_are_found() -> None:
    class WithClassToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.patches = nn.Conv2d(3, 8, 16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.patches(x) + self.class_token.mT[..., None]

    assert make_batch(WithClassToken()).batch.shape == (2, 3, 224, 224)


def test_a_language_model_of_ones_own_gets_tokens_targets_and_its_positions() -> None:
    model = NanoGPT()
    made = make_batch(model)
    assert describe_batch(made.batch) == {
        "idx": ((2, 24), "int64"),
        "targets": ((2, 24), "int64"),
    }
    _, loss = run(model, made.batch)
    assert loss.isfinite()


class TwoTargets(NanoGPT):
    def forward(
        self, idx: Tensor, targets: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().forward(idx, targets if labels is None else labels)


def test_of_two_names_of_targets_each_process_takes_the_same() -> None:
    # The order of a set of texts is another one in half of all processes.
    assert list(make_batch(TwoTargets()).batch) == ["idx", "labels"]


def test_a_wished_length_is_kept() -> None:
    assert make_batch(nn.Embedding(50, 8), max_length=9).batch.shape == (2, 9)
    lstm = nn.LSTM(5, 6, batch_first=True)
    assert make_batch(lstm, batch_size=3, max_length=9).batch.shape == (3, 9, 5)


def test_features_in_front_of_a_sequence_module_get_a_length() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.LSTM(8, 8, batch_first=True))
    assert make_batch(model).batch.shape == (2, 128, 3)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_torchs_transformer_gets_source_and_target_with_the_batch_where_it_is() -> None:
    sizes = {"d_model": 16, "nhead": 2, "dim_feedforward": 16}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1}
    for batch_first, shape in ((True, (3, 128, 16)), (False, (128, 3, 16))):
        model = nn.Transformer(**sizes, batch_first=batch_first)
        made = make_batch(model, batch_size=3)
        assert [tensor.shape for tensor in made.batch] == [shape, shape]
        assert batch_dimension(model) == (0 if batch_first else 1)
        run(model, made.batch)


def test_attention_gets_query_key_and_value_of_their_widths() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)
    made = make_batch(model)
    assert [tensor.shape[-1] for tensor in made.batch] == [8, 4, 6]
    run(model, made.batch)


def test_a_length_first_part_deep_inside_leaves_the_batch_dimension_first() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3)
            self.recurrent = nn.LSTM(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(self.convolution(x).flatten(2).permute(2, 0, 1))

    assert batch_dimension(Recurrent()) == 0
    assert make_batch(Recurrent()).batch.shape == (2, 3, 224, 224)


def test_a_model_on_meta_gets_real_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(16, 4)
    batch = make_batch(model).batch
    assert not batch.is_meta
    assert batch.isfinite().all()


def test_a_half_precision_model_gets_its_own_dtype() -> None:
    assert make_batch(nn.Linear(4, 4).half()).batch.dtype is torch.float16
    assert make_batch(nn.Linear(4, 4).double()).batch.dtype is torch.float64


def test_lightnings_example_is_used_and_copied() -> None:
    example = (torch.ones(1, 4), torch.zeros(1, dtype=torch.int64))
    made = make_batch(Declares(example_input_array=example), batch_size=3)
    assert describe_batch(made.batch) == {
        "0": ((3, 4), "float32"),
        "1": ((3,), "int64"),
    }
    assert made.batch[0].tolist() == [[1.0] * 4] * 3
    assert "example_input_array" in made.notes[0]
    same_size = make_batch(Declares(example_input_array=example), batch_size=1)
    assert same_size.batch[0] is not example[0]


def test_an_example_on_meta_becomes_real() -> None:
    example = torch.zeros(1, 4, device="meta")
    assert make_batch(Declares(example_input_array=example)).batch.isfinite().all()


def test_dummy_inputs_are_used() -> None:
    made = make_batch(Declares(dummy_inputs={"x": torch.ones(1, 4)}))
    assert describe_batch(made.batch) == {"x": ((2, 4), "float32")}


@pytest.mark.parametrize("name", ["pretrained_cfg", "default_cfg"])
def test_timms_input_size_is_used(name: str) -> None:
    made = make_batch(Declares(**{name: {"input_size": (3, 96, 96)}}))
    assert made.batch.shape == (2, 3, 96, 96)
    assert made.notes == ("images of [3, 96, 96], from pretrained_cfg",)


def test_a_model_that_makes_its_own_example_is_asked_for_it() -> None:
    # as integrations.keras.KerasModel does
    example = torch.ones(2, 28, 28, 1)
    made = make_batch(Declares(make_example_batch=lambda _: example))
    assert made.batch is example


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.ReLU(), "ReLU: no layer of it has parameters"),
        (nn.PReLU(), "fixes no input shape"),
        (TwoInputs(), r'needs query, key.*batch={"query": \.\.\., "key": \.\.\.}'),
        (Declares(dummy_inputs={"x": 3}), "dummy_inputs holds no tensor"),
        (
            nn.Sequential(nn.Linear(3, 8), nn.LSTM(8, 8)),
            r"1 \(LSTM\) was made without batch_first=True",
        ),
    ],
    ids=["nothing", "norm", "two", "dummies", "length-first"],
)
def test_what_says_too_little_is_refused_with_the_way_to_pass_a_batch(
    model: nn.Module, reason: str
) -> None:
    with pytest.raises(InputError, match=f"(?s){reason}") as error:
        make_batch(model)
    assert "batch=" in str(error.value)


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"batch_size": 0}, "at least 1 sample, not 0"),
        ({"max_length": 0}, "max_length must be at least 1, not 0"),
    ],
)
def test_impossible_sizes_are_refused(wish: dict[str, int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_batch(nn.Linear(4, 4), **wish)

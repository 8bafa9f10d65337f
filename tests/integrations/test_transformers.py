import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors
from torch import nn

from budgetfit.errors import InputError
from budgetfit.integrations.model_sources.transformers import (
    load_model_on_meta,
    model_from_config,
)

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
# Embedding and head 64 x 16 each; a block 4 x 16 x 16 + 3 x 16 x 32 + 2 norms of 16;
# the last norm.
LLAMA_PARAMETERS = 2 * 64 * 16 + 2 * (4 * 256 + 3 * 512 + 32) + 16

CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own-model"

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(3, 3)
        self.post_init()

    def forward(self, input_ids):
        return self.layer(input_ids)
"""


POSITIONS = {
    "marian": ["model.decoder.embed_positions", "model.encoder.embed_positions"],
    "whisper": ["model.encoder.embed_positions"],
    "roformer": ["roformer.encoder.embed_positions"],
}


def test_a_model_of_two_text_models_is_built() -> None:
    config = transformers.AutoConfig.for_model("musicgen_melody")
    for part in (config.text_encoder, config.audio_encoder, config.decoder):
        part.num_hidden_layers = part.num_layers = 1
    config.architectures = ["MusicgenMelodyForConditionalGeneration"]
    made = model_from_config(config)
    assert type(made.model).__name__ == config.architectures[0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size"])
def test_a_size_of_zero_is_refused(field: str) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, field: 0})
    with pytest.raises(InputError, match=r"weight the size 0x16.* Correct the config"):
        model_from_config(config, name="empty")


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
def test_tables_that_code_freezes_are_planned_as_from_pretrained_leaves_them(
    kind: str, stored: bool, tmp_path: Path
) -> None:
    sizes = dict.fromkeys(
        ("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_size"), 16
    )
    layers = dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), 1)
    heads = dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "num_attention_heads"), 2
    )
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=32, pad_token_id=0, **sizes, **layers, **heads
    )
    made: Any = load_of(kind)(config)
    config.architectures = [type(made).__name__]
    frozen = {f"{name}.weight" for name in POSITIONS[kind]}
    assert trained(made).isdisjoint(frozen)
    weights = {k: v for k, v in made.state_dict().items() if stored or k not in frozen}
    made.save_pretrained(tmp_path, state_dict=weights)
    loaded = type(made).from_pretrained(tmp_path)

    planned = load_model_on_meta(str(tmp_path))

    assert trained(planned.model) == trained(loaded) >= frozen
    assert planned.materialize is not None
    assert trained(planned.materialize("cpu")) == trained(loaded)
    (note,) = [note for note in planned.notes if "from_pretrained" in note]
    assert all(name in note for name in frozen)


def load_of(kind: str) -> type[transformers.PreTrainedModel]:
    return {
        "marian": transformers.MarianMTModel,
        "whisper": transformers.WhisperForConditionalGeneration,
        "roformer": transformers.RoFormerForMaskedLM,
    }[kind]


def trained(model: nn.Module) -> set[str]:
    return {name for name, item in model.named_parameters() if item.requires_grad}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a config.json and returns its path."""

    def write_config(fields: dict[str, Any] | str, name: str = "config.json") -> str:
        file = tmp_path / name
        text = fields if isinstance(fields, str) else json.dumps(fields)
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write_config


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.usefixtures("no_network")
def test_a_file_and_its_folder_give_the_same_model_on_meta(
    write: Callable[..., str],
) -> None:
    file = write(LLAMA)
    for text in (file, str(Path(file).parent)):
        resolved = load_model_on_meta(text)
        assert isinstance(resolved.model, transformers.LlamaForCausalLM)
        assert parameter_count(resolved.model) == LLAMA_PARAMETERS
        assert all(p.is_meta for p in resolved.model.parameters())
        assert resolved.name == Path(file).parent.name
        assert resolved.source == "from config.json, no weights loaded"
        assert resolved.notes == ()


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    config = transformers.Mamba2Config(
        num_hidden_layers=1, hidden_size=32, num_heads=2, head_dim=32, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text("utf-8")
    model: Any = load_model_on_meta(str(tmp_path)).model
    assert tuple(model.config.time_step_limit) == (0.0, math.inf)


def test_a_file_of_another_name_names_the_model(write: Callable[..., str]) -> None:
    resolved = load_model_on_meta(write(LLAMA, "tiny-llama.json"))
    assert resolved.name == "tiny-llama"
    assert resolved.source == "from tiny-llama.json, no weights loaded"


def test_the_dtype_is_the_configs_and_the_generation_cache_is_off(
    write: Callable[..., str],
) -> None:
    model = load_model_on_meta(write(LLAMA)).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.use_cache is False
    assert model.training


def test_the_same_random_weights_are_built_every_time_on_any_device_and_dtype(
    write: Callable[..., str],
) -> None:
    resolved = load_model_on_meta(write(LLAMA))
    state = torch.random.get_rng_state()
    assert resolved.materialize is not None
    first, second = resolved.materialize("cpu"), resolved.materialize("cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    weights = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    assert parameter_count(first) == LLAMA_PARAMETERS
    wide = resolved.materialize("cpu", torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert wide(input_ids=ids, labels=ids).loss.isfinite()


def test_a_config_object_is_planned_and_not_changed() -> None:
    config = transformers.LlamaConfig(**LLAMA)
    before = config.to_dict()
    resolved = model_from_config(config)
    assert parameter_count(resolved.model) == LLAMA_PARAMETERS
    assert resolved.source == "from a LlamaConfig, no weights loaded"
    assert resolved.name == "LlamaForCausalLM"
    assert config.to_dict() == before
    assert config.use_cache is True


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM"),
        ("bart", "BartForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("wav2vec2", "Wav2Vec2ForCTC"),
        ("clip", "CLIPModel"),
        ("llava", "LlavaForConditionalGeneration"),
    ],
)
def test_a_config_without_architectures_gets_its_usual_head_and_a_note(
    write: Callable[..., str], model_type: str, name: str
) -> None:
    resolved = load_model_on_meta(write({"model_type": model_type}))
    assert type(resolved.model).__name__ == name
    note, *others = resolved.notes
    assert note == f"the config names no architecture: planned as {name}"
    assert all("from_pretrained" in each for each in others)  # frozen tables


def test_an_architecture_that_does_not_fit_is_replaced_with_a_note(
    write: Callable[..., str],
) -> None:
    for name in ("LLaMAForCausalLM", "BertForMaskedLM"):
        resolved = load_model_on_meta(write(LLAMA | {"architectures": [name]}))
        assert isinstance(resolved.model, transformers.LlamaForCausalLM)
        assert (
            f"names {name}, which transformers does not have for it"
            in (resolved.notes[0])
        )


def test_the_architecture_decides_the_head(write: Callable[..., str]) -> None:
    fields = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
    resolved = load_model_on_meta(write(fields))
    assert isinstance(resolved.model, transformers.LlamaForSequenceClassification)


@pytest.mark.parametrize(
    "odd",
    [
        {"auto_map": None},
        {"architectures": [3]},
        {"architectures": "LlamaForCausalLM"},
        {"more": {"__float__": "many"}},
        {"more": {"__float__": None}},
    ],
)
def test_odd_values_that_do_not_describe_the_model_do_no_harm(
    write: Callable[..., str], odd: dict[str, object]
) -> None:
    resolved = load_model_on_meta(write(LLAMA | odd))
    assert isinstance(resolved.model, transformers.LlamaForCausalLM)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("./no/such/folder", "There is no file or folder ./no/such/folder"),
        ("/no/such/config.json", "There is no file or folder"),
        ("missing.json", "There is no file or folder missing.json.*hub id such as"),
        ("a/b/c", "There is no file or folder a/b/c"),
        ("weights.safetensors", r"holds weights.*give the config.json"),
        ("model.py", r"needs the name of the function.*model.py:build"),
    ],
)
def test_a_path_that_is_no_config_is_refused_without_asking_the_network(
    text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_model_on_meta(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "is not valid JSON: .* at line 1, column 2"),
        ("[1, 2]", "holds a list where a config is an object"),
        ('{"hidden_size": 16}', 'has no model_type.*"model_type": "llama"'),
        ('{"model_type": "lama"}', r"'lama', which transformers .* Did you mean llama"),
        (
            '{"model_type": ["llama"]}',
            "model_type .'llama'., which transformers .* not",
        ),
        ('{"a":' * 5000 + "1" + "}" * 5000, "cannot be read: RecursionError"),
        ('{"model_type": "llama", "hidden_size": "big"}', "not a config .* for llama"),
        (
            '{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 0}',
            "cannot be built from its config|not a config that transformers",
        ),
    ],
)
def test_a_file_that_describes_no_model_is_refused_with_what_to_do(
    write: Callable[..., str], content: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_model_on_meta(write(content))
    assert "\n" not in str(error.value)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config.json"):
        load_model_on_meta(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds an adapter and no model"):
        load_model_on_meta(str(tmp_path))


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose config brings code; running it leaves a trace."""
    folder = tmp_path / "own"
    folder.mkdir()
    trace = tmp_path / "ran"
    touch = f"import pathlib; pathlib.Path({str(trace)!r}).touch()\n"
    (folder / "own.py").write_text(touch + CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnForCausalLM"}
    auto_map["AutoModelForCausalLM"] = "own.OwnForCausalLM"
    fields = {"model_type": "own-model", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(fields))
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    return folder


def test_code_that_a_config_brings_does_not_run_unless_it_is_trusted(
    own_code: Path,
) -> None:
    with pytest.raises(InputError, match=r"own-model, which is code of its own.*trust"):
        load_model_on_meta(str(own_code))
    assert not (own_code.parent / "ran").exists()
    resolved = load_model_on_meta(str(own_code), trust_remote_code=True)
    assert (own_code.parent / "ran").exists()
    assert type(resolved.model).__name__ == "OwnForCausalLM"
    assert parameter_count(resolved.model) == 12
    assert all(p.is_meta for p in resolved.model.parameters())


def test_a_model_that_transformers_has_too_is_built_without_the_code(
    own_code: Path,
) -> None:
    fields = LLAMA | {"auto_map": {"AutoConfig": "own.OwnConfig"}}
    (own_code / "config.json").write_text(json.dumps(fields))
    resolved = load_model_on_meta(str(own_code))
    assert isinstance(resolved.model, transformers.LlamaForCausalLM)
    assert not (own_code.parent / "ran").exists()


@pytest.mark.parametrize("in_reach", [True, False])
def test_a_hub_id_asks_for_its_config_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, in_reach: bool
) -> None:
    asked = []

    def getaddrinfo(*_: object) -> list[str]:
        if in_reach:
            return ["an address"]
        raise OSError("Name or service not known")

    def from_pretrained(name: str, **options: object) -> transformers.LlamaConfig:
        asked.append((name, options))
        return transformers.LlamaConfig(**LLAMA)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("budgetfit.integrations.model_sources.hub.getproxies", dict)
    resolved = load_model_on_meta("org/tiny-llama")
    # Out of reach, the cache is asked at once instead of after 24 s of retries.
    options = {"trust_remote_code": False, "local_files_only": not in_reach}
    assert asked == [("org/tiny-llama", options)]
    assert resolved.name == "tiny-llama"
    assert "org/tiny-llama on the hub, no weights loaded" in resolved.source


@pytest.fixture
def no_file_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def hf_hub_download(*_: object, **__: object) -> None:
        raise hub_error(hub_errors.RemoteEntryNotFoundError)

    where = "budgetfit.integrations.model_sources.diffusers.hf_hub_download"
    monkeypatch.setattr(where, hf_hub_download)


def hub_error(kind: type[Exception]) -> Exception:
    """Return an error of the hub without the web answer that it usually carries."""
    return kind.__new__(kind)


@pytest.mark.usefixtures("no_file_on_the_hub")
@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (hub_errors.GatedRepoError, r"org/name is gated: .*hf.co/org/name.*auth login"),
        (
            hub_errors.RepositoryNotFoundError,
            "no model org/name on the hub, nor a file",
        ),
        (hub_errors.RemoteEntryNotFoundError, "org/name has no config.json on the hub"),
        (hub_errors.LocalEntryNotFoundError, "the hub is out of reach and its cache"),
        (ConnectionError, "could not be fetched.*give a folder or a config.json"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, cause: type[Exception], message: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])

    def from_pretrained(*_: object, **__: object) -> None:
        raise OSError("many\nlines") from hub_error(cause)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(InputError, match=message) as error:
        load_model_on_meta("org/name")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_file_on_the_hub")
def test_hub_code_is_named_before_it_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])

    def from_pretrained(*_: object, **__: object) -> None:
        raise ValueError("Please pass the argument `trust_remote_code=True`")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(InputError, match=r"brings its own code. Read it at https://hf"):
        load_model_on_meta("org/name")

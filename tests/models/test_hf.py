"""Hugging Face checkpoints in and out: the same logits on both sides, and clear words where there is no counterpart."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from scaling.config.model import ModelConfig, MoEConfig
from scaling.config.residual import Baseline, Delta, Mhar, Mhc, Msar, MuddFormer, ReZero
from scaling.errors import CheckpointError, ConfigError
from scaling.models.hf import export_model, import_model, names, read_config
from scaling.models.transformer import Transformer
from scaling.trained import load_model, read_model, write_model

SHAPE: dict[str, Any] = {
    "num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 48, "vocab_size": 67, "head_dim": 12,
}  # fmt: skip


def model_of(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    model.init_weights(3)
    with torch.no_grad():  # gains that are not 1, so that a swapped norm shows
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    return model


@pytest.fixture
def transformers() -> Any:
    """The library of that name; importing it warns about other people's deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("transformers")
        module.logging.set_verbosity_error()
        return module


def run_quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_exported_logits_are_those_of_transformers(transformers: Any, tmp_path: Path, qk_norm: bool) -> None:
    config = ModelConfig(**SHAPE, qk_norm=qk_norm, rope_theta=50_000.0)
    model = model_of(config)
    export_model(config, model.state_dict(), tmp_path)
    theirs = run_quietly(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    )
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    tokens = torch.randint(0, 67, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = run_quietly(lambda: theirs(tokens).logits)
        torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_imported_logits_are_those_of_transformers(transformers: Any, tmp_path: Path, kind: str) -> None:
    told: dict[str, Any] = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 67, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config = transformers.Qwen3Config(**told, head_dim=8) if kind == "qwen3" else transformers.LlamaConfig(**told)
    torch.manual_seed(0)
    theirs = run_quietly(lambda: transformers.AutoModelForCausalLM.from_config(config).eval())
    run_quietly(lambda: theirs.save_pretrained(tmp_path))
    model = import_model(tmp_path)
    assert model.config.norm_eps == 1e-5
    tokens = torch.randint(0, 67, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = run_quietly(lambda: theirs(tokens).logits)
        torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
def test_round_trip_is_bit_for_bit(tmp_path: Path, qk_norm: bool) -> None:
    config = ModelConfig(**SHAPE, qk_norm=qk_norm, rope_theta=1e6)
    model = model_of(config).bfloat16()
    export_model(config, model.state_dict(), tmp_path)
    again = import_model(tmp_path)
    assert again.config == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert again.state_dict()[name].dtype == torch.bfloat16


def test_a_checkpoint_converts_to_a_method_that_starts_as_the_same_model(tmp_path: Path) -> None:
    config = ModelConfig(**SHAPE, norm_eps=1e-20)
    model = model_of(config)
    export_model(config, model.state_dict(), tmp_path)
    tokens = torch.randint(0, 67, (2, 11), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)
    assert torch.equal(import_model(tmp_path, Delta(gate="learned", null_source=True))(tokens), expected)
    for options in (Mhar(heads=4), Mhc(), Msar(), Delta()):
        torch.testing.assert_close(import_model(tmp_path, options)(tokens), expected, rtol=1e-4, atol=1e-5)


def test_sharded_checkpoints_are_read(tmp_path: Path) -> None:
    config = ModelConfig(**SHAPE)
    model = model_of(config)
    export_model(config, model.state_dict(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    keys = sorted(tensors)
    parts = {"a.safetensors": keys[:7], "b.safetensors": keys[7:]}
    for file, own in parts.items():
        save_file({key: tensors[key] for key in own}, tmp_path / file)
    index = {"weight_map": {key: file for file, own in parts.items() for key in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert torch.equal(import_model(tmp_path).embedding.weight, model.embedding.weight)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: missing; only safetensors checkpoints"):
        import_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' cannot be converted; allowed: qwen3, llama"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False has no counterpart"),
        ({"attention_bias": True}, "attention_bias=True has no counterpart"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' has no counterpart"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type='llama3' has no counterpart"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type='yarn' has no counterpart"),
        ({"use_sliding_window": True}, "use_sliding_window=True has no counterpart"),
    ],
    ids=str,
)
def test_parts_that_the_backbone_has_not_are_named(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    config = ModelConfig(**SHAPE)
    export_model(config, model_of(config).state_dict(), tmp_path)
    told = json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) | change
    (tmp_path / "config.json").write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_config(tmp_path)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: missing; give the folder of a Hugging Face checkpoint"):
        import_model(tmp_path)
    config = ModelConfig(**SHAPE)
    export_model(config, model_of(config).state_dict(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the output matrix differs from the embedding"):
        import_model(tmp_path)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight' is missing"):
        import_model(tmp_path)
    save_file({**tensors, "model.norm.weight": torch.ones(5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight' is \(5,\), config\.json asks for \(32,\)"):
        import_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        import_model(tmp_path)


@pytest.mark.parametrize("options", [Mhar(heads=4), Delta(heads=4), ReZero()], ids=lambda o: o.method)
def test_residual_methods_are_refused_on_the_way_out(tmp_path: Path, options: Any) -> None:
    config = ModelConfig(**SHAPE, residual=options)
    with pytest.raises(ConfigError, match=f"model.residual.method='{options.method}' has no Hugging Face class"):
        export_model(config, Transformer(config).state_dict(), tmp_path)
    sparse = ModelConfig(**SHAPE, moe=MoEConfig(num_experts=4, top_k=1, d_expert=8))
    with pytest.raises(ConfigError, match="only dense models export"):
        export_model(sparse, Transformer(sparse).state_dict(), tmp_path)


@pytest.mark.parametrize("options", [ReZero(), MuddFormer()], ids=lambda o: o.method)
def test_methods_that_change_the_backbone_are_refused_on_the_way_in(tmp_path: Path, options: Any) -> None:
    config = ModelConfig(**SHAPE)
    export_model(config, model_of(config).state_dict(), tmp_path)
    with pytest.raises(ConfigError, match="changes the backbone .* a checkpoint converts to methods that keep it"):
        import_model(tmp_path, options)


def test_names_cover_every_parameter_once() -> None:
    config = ModelConfig(**SHAPE)
    table = names(config)
    assert table.keys() == dict(Transformer(config).named_parameters()).keys()
    assert len(set(table.values())) == len(table)


def test_the_commands_convert_and_export(tmp_path: Path) -> None:
    from scaling.cli.model import app

    config = ModelConfig(**SHAPE)
    model = model_of(config)
    export_model(config, model.state_dict(), tmp_path / "hf")
    runner = CliRunner()
    done = runner.invoke(app, ["convert", str(tmp_path / "hf"), "--out", str(tmp_path / "own"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["parameters"] == sum(p.numel() for p in model.parameters())
    assert torch.equal(load_model(tmp_path / "own").embedding.weight, model.embedding.weight)
    done = runner.invoke(app, ["export", str(tmp_path / "own"), "--out", str(tmp_path / "back"), "--json"])
    assert json.loads(done.stdout) == {"out": str(tmp_path / "back"), "model_type": "qwen3", "tensors": 24}
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    done = runner.invoke(
        app,
        ["convert", str(tmp_path / "hf"), "--method", "delta", "--set", "gate=learned", "--set", "heads=4", "--out",
         str(tmp_path / "delta")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert read_model(tmp_path / "delta")[0].residual == Delta(gate="learned", heads=4)
    with pytest.raises(CheckpointError, match="holds a model already"):
        write_model(model, tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"no config\.json or model\.yaml here or above"):
        read_model(tmp_path / "nowhere" / "a" / "b" / "c")
    assert isinstance(load_model(tmp_path / "own").config.residual, Baseline)

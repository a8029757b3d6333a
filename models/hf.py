"""Models in and out of Hugging Face's format: Qwen3 and Llama checkpoints with tied embeddings.

Beside ``transformer`` in the flow; ``scaling model convert`` and ``export`` use it. Works on ``config.json`` and
safetensors files, without ``transformers``. Both sides rotate the first half of a head against the second, so query and
key rows keep their order. A checkpoint may be converted to a residual method that starts as the pre-norm function
(``delta`` with ``gate=learned`` is the same model bit for bit); there is no Hugging Face class to export one to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scaling.config.model import ModelConfig
from scaling.config.residual import Baseline, ResidualConfig
from scaling.config.strict import build
from scaling.errors import CheckpointError, ConfigError
from scaling.models.transformer import Transformer

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DEFAULT_POSITIONS: Final = 32_768  # Qwen3's; our rotary embedding has no limit of its own

# Field of ModelConfig: field of Hugging Face's configuration.
_FIELDS: Final = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
_LAYER: Final = {
    "attention.norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_QK_NORM: Final = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_ARCHITECTURES: Final = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def names(config: ModelConfig) -> dict[str, str]:
    """Our parameter names of a baseline model -> Hugging Face's.

    >>> from scaling.config.ladder import shape
    >>> names(ModelConfig(**shape("50k")))["layers.1.attention.query.weight"]
    'model.layers.1.self_attn.q_proj.weight'
    """
    layer = _LAYER | (_QK_NORM if config.qk_norm else {})
    table = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    for index in range(config.num_layers):
        for ours, theirs in layer.items():
            table[f"layers.{index}.{ours}.weight"] = f"model.layers.{index}.{theirs}.weight"
    return table


def read_config(folder: Path, residual: ResidualConfig | None = None) -> ModelConfig:
    """The shape that a Hugging Face folder's ``config.json`` describes.

    Raises
    ------
    CheckpointError
        If the file is missing or damaged.
    ConfigError
        If the model has a part that the backbone has not (biases, scaled rotary embedding, an untied output, sliding
        windows, another activation or architecture); the text names it.
    """
    path = folder / CONFIG
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; give the folder of a Hugging Face checkpoint") from None
    except ValueError:
        raise CheckpointError(f"{path}: not JSON; download the checkpoint again") from None
    kind = told.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"{path}: model_type={kind!r} cannot be converted; allowed: {', '.join(_ARCHITECTURES)}")
    # Where a field is absent, Hugging Face's classes take these values.
    rotary = told.get("rope_parameters") or told.get("rope_scaling") or {}
    rotary_kind = rotary.get("rope_type") or rotary.get("type") or "default"
    demands: dict[str, tuple[Any, Any]] = {
        "hidden_act": (told.get("hidden_act", "silu"), "silu"),
        "attention_bias": (told.get("attention_bias", False), False),
        "mlp_bias": (told.get("mlp_bias", False), False),
        "tie_word_embeddings": (told.get("tie_word_embeddings", False), True),
        "use_sliding_window": (told.get("use_sliding_window", False), False),
        "rope_type": (rotary_kind, "default"),
    }
    for name, (found, wanted) in demands.items():
        if found != wanted:
            raise ConfigError(f"{path}: {name}={found!r} has no counterpart in the backbone; it must be {wanted!r}")
    missing = [theirs for theirs in _FIELDS.values() if theirs not in told and theirs != "num_key_value_heads"]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]!r} is missing; download the checkpoint again")
    tree: dict[str, Any] = {ours: told[theirs] for ours, theirs in _FIELDS.items() if theirs in told}
    tree.setdefault("num_kv_heads", tree["num_heads"])
    tree["head_dim"] = told.get("head_dim") or tree["d_model"] // tree["num_heads"]
    tree["rope_theta"] = float(rotary.get("rope_theta") or told.get("rope_theta") or 10_000.0)
    tree["qk_norm"] = kind == "qwen3"
    config = build(ModelConfig, tree, source=str(path))
    return config if residual is None else replace(config, residual=residual)


def write_config(config: ModelConfig, folder: Path, *, dtype: torch.dtype) -> None:
    """Write ``config.json`` for Qwen3 or, without QK-norm, Llama."""
    kind = "qwen3" if config.qk_norm else "llama"
    told: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    told |= {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "head_dim": config.attention_head_dim,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": config.init_std,
        "max_position_embeddings": DEFAULT_POSITIONS,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
    (folder / CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder, one file or sharded.

    Raises
    ------
    CheckpointError
        If there are none, or a file is damaged or missing.
    """
    files = [folder / WEIGHTS]
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; only safetensors checkpoints can be converted")
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged ({error}); download it again") from None
    return tensors


def import_model(folder: Path, residual: ResidualConfig | None = None, *, seed: int = 0) -> Transformer:
    """A Qwen3 or Llama checkpoint as a model, with the residual method's own parameters at their start.

    Parameters
    ----------
    folder
        With ``config.json`` and ``model.safetensors`` (or its shards).
    residual
        The residual method; ``None``: the plain stream that the checkpoint was trained with.
    seed
        For starts of the method's parameters that are random.

    Raises
    ------
    CheckpointError, ConfigError
        If the checkpoint cannot be read, does not fit, or the method needs another backbone.
    """
    config = read_config(folder, residual)
    theirs = read_weights(folder)
    table = names(config)
    head, embedding = theirs.pop("lm_head.weight", None), theirs.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise CheckpointError(f"{folder}: the output matrix differs from the embedding; only tied models convert")
    model = Transformer(config)
    state = model.state_dict()
    backbone = {name for name in state if not name.startswith("residual.")}
    if backbone != table.keys():
        odd = sorted(backbone ^ table.keys())[0]
        raise ConfigError(
            f"model.residual.method={config.residual.method!r} changes the backbone ({odd}); a checkpoint converts to "
            "methods that keep it, e.g. delta, mhar, mhc"
        )
    unknown, absent = theirs.keys() - set(table.values()), set(table.values()) - theirs.keys()
    if unknown or absent:
        what = f"{sorted(absent)[0]!r} is missing" if absent else f"{sorted(unknown)[0]!r} is unknown"
        raise CheckpointError(f"{folder}: tensor {what}; the weights do not fit {CONFIG}")
    dtype = theirs["model.embed_tokens.weight"].dtype
    model.to(dtype)
    model.init_weights(seed)
    for ours, name in table.items():
        if state[ours].shape != theirs[name].shape:
            found, wanted = tuple(theirs[name].shape), tuple(state[ours].shape)
            raise CheckpointError(f"{folder}: tensor {name!r} is {found}, {CONFIG} asks for {wanted}")
    model.load_state_dict({ours: theirs[name] for ours, name in table.items()}, strict=False)
    return model


def export_model(config: ModelConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a baseline model as a Hugging Face folder.

    Raises
    ------
    ConfigError
        For a residual method or experts, which no Hugging Face class has.
    CheckpointError
        If the weights do not fit the configuration.
    """
    if not isinstance(config.residual, Baseline):
        raise ConfigError(
            f"model.residual.method={config.residual.method!r} has no Hugging Face class; only baseline models export"
        )
    if config.moe is not None:
        raise ConfigError(
            "model.moe has no Hugging Face class with sigmoid scores and biases; only dense models export"
        )
    table = names(config)
    if weights.keys() != table.keys():
        odd = sorted(weights.keys() ^ table.keys())[0]
        raise CheckpointError(f"tensor {odd!r} is in the checkpoint or the configuration but not in both")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {theirs: weights[ours].contiguous() for ours, theirs in table.items()}
    write_config(config, folder, dtype=tensors["model.embed_tokens.weight"].dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

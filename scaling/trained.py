"""A trained model from disk: its configuration and weights together.

After ``checkpoint`` and ``record`` in the flow; exporters and probes use it. Two kinds of folder hold one: a
run folder, and a model folder (``model.yaml`` with the configuration's ``model`` section beside ``model.safetensors``),
which ``scaling model convert`` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml
from safetensors.torch import save_file
from torch import Tensor

from scaling.checkpoint import load_weights
from scaling.config.model import ModelConfig
from scaling.config.strict import build, read_yaml
from scaling.config.tree import to_dict
from scaling.errors import CheckpointError, UsageError
from scaling.models.transformer import Transformer
from scaling.record import CONFIG, RunFolder
from scaling.tokens import TokenStore

MODEL: Final = "model.yaml"
WEIGHTS: Final = "model.safetensors"


def read_model(path: Path, *, average: bool = False) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and weights of a run folder, a checkpoint inside one, or a model folder.

    Raises
    ------
    CheckpointError
        If there is no configuration near ``path``, or no usable weights.
    """
    for folder in (path, *path.resolve().parents[:3]):
        if (folder / MODEL).is_file():
            tree, lines = read_yaml(folder / MODEL)
            config = build(ModelConfig, tree.get("model", {}), path="model", source=str(folder / MODEL), lines=lines)
            return config, load_weights(path, average=average)
        if (folder / CONFIG).is_file():
            return RunFolder(folder).config().model, load_weights(path, average=average)
    raise CheckpointError(f"{path}: no {CONFIG} or {MODEL} here or above; give a run folder or a converted model")


def run_of(checkpoint: Path) -> RunFolder | None:
    """The run folder that a checkpoint lies in (or is); ``None`` for a model from elsewhere."""
    found = next((f for f in (checkpoint, *checkpoint.resolve().parents[:3]) if (f / CONFIG).is_file()), None)
    return None if found is None else RunFolder(found)


def store_of(checkpoint: Path, model: Transformer, data: Path | None) -> TokenStore:
    """The token store of a checkpoint's tokens: ``data``, by default what its run was trained on.

    Raises
    ------
    UsageError
        If ``data`` is not given and the checkpoint does not know its store, or the store has more ids than the model.
    """
    run = run_of(checkpoint)
    if data is None and run is not None and (trained_on := run.config().data.path):
        data = Path(trained_on)
    if data is None:
        raise UsageError(f"{checkpoint}: does not say which token store it was trained on; give --data STORE")
    store = TokenStore.open(data)
    if store.vocab_size > model.config.vocab_size:
        raise UsageError(
            f"{data}: has {store.vocab_size} token ids, the model {model.config.vocab_size}; give the store it was "
            "trained on with --data"
        )
    return store


def load_model(path: Path, *, average: bool = False) -> Transformer:
    """The model with its weights, in their precision, on the CPU."""
    config, weights = read_model(path, average=average)
    model = Transformer(config)
    model.to(next(iter(weights.values())).dtype)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: the weights do not fit the configuration ({error})".replace("\n", " ")
        ) from None
    return model


def write_model(model: Transformer, folder: Path) -> None:
    """Write a model folder; ``CheckpointError`` where there is one already or it cannot be written."""
    if (folder / WEIGHTS).exists():
        raise CheckpointError(f"{folder}: holds a model already; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # the library lets only the owner read
        text = yaml.safe_dump({"model": to_dict(model.config)}, sort_keys=False)
        (folder / MODEL).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}); choose another --out") from None

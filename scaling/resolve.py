"""From the configuration a person wrote to the one that runs: every derived value filled in.

After ``accounting`` in the flow. Sweeps, the trainer and the run key only ever see resolved configurations, so that
two ways of writing the same run have one identity.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from scaling.accounting import count_parameters
from scaling.config.tree import RunConfig
from scaling.errors import ConfigError, DataError

STORE_META = "meta.json"  # written by `scaling data prepare` beside the tokens; holds "fingerprint" and "vocab_size"


def resolve(config: RunConfig) -> RunConfig:
    """Fill in steps, warm-up steps and the data fingerprint; resolving twice changes nothing.

    Raises
    ------
    ConfigError
        If neither or both of ``schedule.steps`` and ``schedule.tokens_per_parameter`` are given, the warm-up is longer
        than the run, or the token store is not the one that ``data.fingerprint`` names.
    """
    schedule = config.schedule
    steps = schedule.steps
    if steps is None:
        if schedule.tokens_per_parameter is None:
            raise ConfigError("schedule: give steps or tokens_per_parameter")
        count = count_parameters(config.model)
        parameters = count.total if schedule.parameters == "total" else count.non_embedding
        steps = max(1, math.ceil(schedule.tokens_per_parameter * parameters / config.data.tokens_per_step))
    elif schedule.tokens_per_parameter is not None:
        raise ConfigError("schedule: give steps or tokens_per_parameter, not both")
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = min(steps, max(1, round(schedule.warmup_fraction * steps)))
    if warmup > steps:
        raise ConfigError(f"schedule.warmup_steps={warmup} exceeds schedule.steps={steps}")
    data = config.data
    if data.path:
        found = store_fingerprint(Path(data.path))
        if data.fingerprint is not None and found is not None and found != data.fingerprint:
            raise ConfigError(
                f"data.fingerprint={data.fingerprint} but the store at {data.path} has {found}; "
                "point data.path at the right store, or drop the fingerprint"
            )
        data = replace(data, fingerprint=data.fingerprint or found)
    schedule = replace(schedule, steps=steps, tokens_per_parameter=None, warmup_steps=warmup)
    return replace(config, schedule=schedule, data=data)


def store_fingerprint(path: Path) -> str | None:
    """Fingerprint of the token store at ``path``; ``None`` where there is no store yet (it is made later)."""
    meta = path / STORE_META
    if not meta.exists():
        return None
    try:
        return str(json.loads(meta.read_text(encoding="utf-8"))["fingerprint"])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{meta}: not a token store's description; prepare the store again") from None

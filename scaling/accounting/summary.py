"""One model's costs as plain data and as a table for people: what ``scaling model info`` prints.

Last in ``accounting``; reads all of it.
"""

from __future__ import annotations

from typing import Any

from scaling.accounting.flops import count_flops
from scaling.accounting.memory import estimate_memory
from scaling.accounting.parameters import count_parameters
from scaling.config.tree import RunConfig, to_dict


def summarise(config: RunConfig) -> dict[str, Any]:
    """Parameters by group, FLOPs a token by group, and bytes, with the conventions they follow."""
    parameters = count_parameters(config.model)
    flops = count_flops(config.model, config.data.seq_len)
    memory = estimate_memory(config)
    return {
        "model": to_dict(config.model),
        "parameters": {
            "groups": parameters.groups,
            "total": parameters.total,
            "non_embedding": parameters.non_embedding,
            "activated": parameters.activated,
            "activated_non_embedding": parameters.activated_non_embedding,
        },
        "flops_per_token": {
            "seq_len": config.data.seq_len,
            "forward_groups": flops.groups,
            "forward": flops.forward,
            "training": flops.training,
            "routing": flops.routing,
            "six_nd": flops.six_nd,
            "six_nd_total": flops.six_nd_total,
        },
        "bytes": {
            "precision": config.precision.mode,
            "micro_batch_size": config.data.micro_batch_size or config.data.batch_size,
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "logits": memory.logits,
            "total": memory.total,
        },
        "conventions": {
            "flops": "a multiply-add is 2; causal attention over (T + 1) / 2 keys; training = 3 forward; no norms",
            "six_nd": "6 N with N the activated parameters without embedding; six_nd_total with it",
            "bytes": "one device without sharding; activations of one micro-batch without checkpointing",
        },
    }


def render(summary: dict[str, Any]) -> str:
    """The summary as aligned text.

    >>> print(_rows({"attention": 1_000_000, "norms": 5}, total=2_000_000))
      attention                 1,000,000   50.0 %
      norms                             5    0.0 %
    """
    model, parameters = summary["model"], summary["parameters"]
    flops, memory = summary["flops_per_token"], summary["bytes"]
    options = {key: value for key, value in model["residual"].items() if key != "method" and value is not None}
    told = ", ".join(f"{key} {value}" for key, value in options.items())
    name = model["size"] or "model"
    heads = f"{model['num_heads']} heads, {model['num_kv_heads']} key/value heads"
    lines = [
        f"{name}: {model['num_layers']} layers, width {model['d_model']}, {heads}, feed-forward {model['d_ffn']}, "
        f"vocabulary {model['vocab_size']:,}",
        f"residual: {model['residual']['method']}" + (f" ({told})" if told else ""),
    ]
    if model["moe"]:
        moe = model["moe"]
        lines.append(
            f"experts: {moe['num_experts']} routed (top {moe['top_k']}) and {moe['num_shared_experts']} shared, "
            f"width {moe['d_expert']}, first {moe['num_dense_layers']} layers dense"
        )
    totals = {"total": parameters["total"], "non-embedding": parameters["non_embedding"]}
    if parameters["activated"] != parameters["total"]:
        totals["activated"] = parameters["activated"]
    lines += ["", "parameters", _rows(parameters["groups"], total=parameters["total"]), _rows(totals)]
    lines += ["", f"FLOPs a token, forward, at {flops['seq_len']:,} tokens"]
    lines += [_rows(flops["forward_groups"], total=flops["forward"])]
    named = {"forward": "forward", "training": "training", "routing": "of it routing"}
    lines += [_rows({label: flops[key] for key, label in named.items()})]
    lines += [_rows({"6 N (non-embedding)": flops["six_nd"], "6 N (total)": flops["six_nd_total"]})]
    lines += ["", f"GiB, {memory['precision']} precision, micro-batch of {memory['micro_batch_size']} sequences"]
    kinds = ("parameters", "gradients", "optimizer", "activations", "logits", "total")
    lines += [f"  {kind:<20} {memory[kind] / 2**30:>14.3f}" for kind in kinds]
    return "\n".join(lines)


def _rows(values: dict[str, float], *, total: float | None = None) -> str:
    share = {name: f"   {100 * value / total:4.1f} %" if total else "" for name, value in values.items()}
    return "\n".join(f"  {name.replace('_', ' '):<20} {value:>14,.0f}{share[name]}" for name, value in values.items())

"""What are the weights called in the official implementation (SamsungSAILMontreal/TinyRecursiveModels)?"""

from collections.abc import Mapping

from torch import Tensor

_NAMES = {
    "tokens.weight": "embed_tokens.embedding_weight",
    "places.weight": "embed_pos.embedding_weight",
    "table.weight": "puzzle_emb.weights",
    "to_tokens.weight": "lm_head.weight",
    "to_halt.weight": "q_head.weight",
    "to_halt.bias": "q_head.bias",
    "y0": "H_init",
    "z0": "L_init",
}
_IN_BLOCK = {
    "attention.queries_keys_values.weight": "self_attn.qkv_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mix.gate_up.weight": "mlp_t.gate_up_proj.weight",
    "mix.down.weight": "mlp_t.down_proj.weight",
    "feed_forward.gate_up.weight": "mlp.gate_up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_PREFIXES = ("_orig_mod.", "model.", "inner.")
"""Put in front by compiling, by the loss head and by the wrapper that halts, in this order."""


def their_name(name: str) -> str:
    """The name there of one of our weights.

    >>> their_name("blocks.1.feed_forward.down.weight")
    'L_level.layers.1.mlp.down_proj.weight'
    """
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        return f"L_level.layers.{index}.{_IN_BLOCK[rest]}"
    return _NAMES[name]


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of theirs without what stands in front of the names."""
    plain = {}
    for name, tensor in state.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        plain[name] = tensor
    return plain

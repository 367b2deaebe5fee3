"""How is a large model trained with few weights? Low-rank updates beside its matrices, by peft."""

from typing import Any

from whet.base.errors import UsageError


def add_lora(network: Any, *, rank: int, dropout: float) -> Any:
    """The network with updates of a rank beside its matrices; of the rest only the head learns."""
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            "LoRA needs the extra lora", got=str(error), try_="pip install 'whet[lora]', or without lora="
        ) from None
    # Twice the rank: the updates count the same whatever the rank, and peft's own examples do so.
    choice = peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, lora_dropout=dropout)
    try:
        return peft.get_peft_model(network, choice)
    except ValueError:
        # Models that peft does not know by name: every linear layer.
        choice.target_modules = "all-linear"
        return peft.get_peft_model(network, choice)


def merged(network: Any) -> Any:
    """The network with its updates added to its own matrices; as it is where there are none."""
    return network.merge_and_unload() if hasattr(network, "merge_and_unload") else network

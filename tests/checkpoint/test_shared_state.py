"""Tensors of a state that are the same object, or share memory, do so again after they are decoded."""

import pytest
import torch

from whet.checkpoint.state_json import StateDecoder, StateEncoder

pytestmark = pytest.mark.torch


def round_trip(*states: object) -> list[object]:
    encoder = StateEncoder()
    encoded = [encoder.encode(state, f"state{number}/") for number, state in enumerate(states)]
    decoder = StateDecoder(encoder.finish())
    return [decoder.decode(one) for one in encoded]


def test_the_same_view_in_two_states_is_one_object() -> None:
    """LAMB keeps norms that are views of one tensor, and a state_dict of its own that holds the same objects."""
    norms = torch.arange(3.0)
    first, second = norms[0], norms[1]
    ours, theirs = round_trip({"a": first, "b": second}, {"b": second, "a": first})
    assert ours["a"] is theirs["a"]
    assert ours["b"] is theirs["b"]
    assert [float(ours["a"]), float(ours["b"])] == [0.0, 1.0]
    assert ours["a"].untyped_storage().data_ptr() == ours["b"].untyped_storage().data_ptr()


def test_the_same_alias_in_two_states_is_one_object() -> None:
    weight = torch.randn(4)
    alias = weight.detach()
    ours, theirs = round_trip([weight, alias], [alias])
    assert ours[1] is theirs[0]
    assert ours[1] is not ours[0]
    ours[0].add_(1)
    assert torch.equal(theirs[0], ours[0])

"""Tensors and containers of a state that are the same object, or share memory, do so again after they are decoded."""

import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import NotEncodableError, StateEncoder
from whet.checkpoint.state_format import missing_children, seed_of_spawner, spawn

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


def test_a_container_at_two_places_is_one_object() -> None:
    seen, order = [1, [2]], {"z": 1, "a": 2}
    made = round_trip({"a": seen, "b": (seen, seen[1]), "c": {"order": order}, "d": [order], "e": [1, [2]]})[0]
    assert made["a"] is made["b"][0]
    assert made["a"][1] is made["b"][1]
    assert made["c"]["order"] is made["d"][0]
    assert made["e"] == made["a"] == [1, [2]]
    assert made["e"] is not made["a"]
    assert list(made["d"][0].items()) == [("z", 1), ("a", 2)]


def test_generators_sets_and_arrays_at_two_places_are_one_object() -> None:
    objects = [torch.Generator(), random.Random(1), np.random.default_rng(2), {1}, deque([1]), np.zeros(2), Counter()]
    made = round_trip({"first": objects, "again": list(objects)})[0]
    assert all(ours is theirs for ours, theirs in zip(made["first"], made["again"], strict=True))


def test_a_generator_spawns_the_same_again() -> None:
    spawner = np.random.default_rng(2)
    spawner.spawn(3)
    made = round_trip({"spawner": spawner})[0]["spawner"]
    assert made.spawn(1)[0].random() == spawner.spawn(1)[0].random()


def test_a_generator_that_spawned_thousands_is_advanced_in_parts() -> None:
    spawner, again = np.random.default_rng(2), np.random.default_rng(2)
    spawner.spawn(2_500)
    spawn(again, missing_children(again, seed_of_spawner(spawner)) or 0)
    assert again.spawn(1)[0].random() == spawner.spawn(1)[0].random()


def test_a_seed_that_would_be_mixed_for_hours_is_refused() -> None:
    spawner = np.random.default_rng(2)
    spawner.spawn(1)
    encoder = StateEncoder()
    encoded: Any = encoder.encode(spawner, "spawner")
    encoded["seed"]["pool_size"] = 10**6
    with pytest.raises(ValueError, match="a pool of 1000000 words"):
        StateDecoder(encoder.finish()).decode(encoded)


def test_equal_containers_of_two_states_stay_two_objects() -> None:
    seen = [1]
    ours, theirs = round_trip({"a": seen}, {"a": seen})
    assert ours["a"] == theirs["a"]
    assert ours["a"] is not theirs["a"]


def test_keys_that_look_like_ids_survive() -> None:
    state = {"$id": 1, "$": 2, "a": [{"$": "id", "value": "x"}, 3]}
    assert round_trip(state) == [state]


def test_a_state_inside_of_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(NotEncodableError, match="inside itself"):
        StateEncoder().encode(state, "state/")

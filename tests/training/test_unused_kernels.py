"""Requested kernels of whet that would not be used are refused, with what they support."""

import pytest

from whet.base.errors import UsageError
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.recipes.hex.config import HexConfig, describe_hex
from whet.recipes.text.config import TextConfig
from whet.recipes.text.config import describe as describe_text
from whet.training.checks import check_whet_attention, check_whet_norms

pytestmark = pytest.mark.torch


def planned(workload: Workload, **overrides: Scalar) -> Plan:
    workload = workload.model_copy(update={"num_samples": 10_000, "num_steps": 1_000})
    return make_plan(load_machine("h200"), workload, overrides={"attention": "whet", "precision": "bf16", **overrides})


def refusal(lengths: str) -> UsageError | None:
    try:
        check_whet_attention(planned(describe_text(TextConfig()), lengths=lengths))
    except UsageError as error:
        return error
    return None


def test_padded_texts_are_refused_with_a_fix() -> None:
    refused = {lengths: refusal(lengths) for lengths in ("fixed", "sorted", "bucketed", "packed", "packed_bucketed")}
    assert [lengths for lengths, error in refused.items() if error is None] == ["packed", "packed_bucketed"]
    error = refused["sorted"]
    assert error is not None
    assert "packed sequences" in str(error)
    assert "lengths=sorted" in str(error.got)
    assert str(error.try_).startswith("lengths=packed")


def test_float32_has_none() -> None:
    with pytest.raises(UsageError, match="half precision") as refused:
        check_whet_attention(planned(describe_text(TextConfig()), lengths="packed", precision="fp32"))
    assert "precision=fp32" in str(refused.value.got)


def test_a_model_without_attention_has_none() -> None:
    with pytest.raises(UsageError, match="the model has no attention"):
        check_whet_attention(planned(describe_hex(HexConfig())))


def test_norms_of_our_own_are_refused_where_they_have_nothing_to_do() -> None:
    bert, hex_net = describe_text(TextConfig(model="bert-base-uncased")), describe_hex(HexConfig(size=13))
    check_whet_norms(planned(bert, attention="torch", norms="whet"))
    check_whet_norms(planned(hex_net, attention="torch", norms="whet"))
    refused = {
        "no norms that": planned(describe_text(TextConfig()), norms="whet"),
        "need channels_last": planned(hex_net, norms="whet", layout="contiguous"),
        "half precision": planned(bert, norms="whet", precision="fp32"),
    }
    for words, plan in refused.items():
        with pytest.raises(UsageError, match=words):
            check_whet_norms(plan)

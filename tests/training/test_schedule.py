"""Learning rate schedules."""

import json

import pytest

from whet.base.errors import WhetError
from whet.training.schedule import make_schedule

pytestmark = pytest.mark.torch


def test_schedules() -> None:
    linear = make_schedule("linear", total_steps=10, warmup_steps=2)
    assert [round(linear.factor(step), 3) for step in (1, 2, 3, 10)] == [0.333, 0.667, 1.0, 0.125]
    cosine = make_schedule("cosine", total_steps=10)
    assert cosine.factor(1) == 1.0
    assert 0 < cosine.factor(10) < 0.03
    assert all(make_schedule("constant", total_steps=None).factor(step) == 1.0 for step in range(1, 9))
    assert make_schedule(lambda step: 1 / step, total_steps=None).factor(4) == 0.25
    with pytest.raises(WhetError, match="max_steps"):
        make_schedule("cosine", total_steps=None)


def test_plateau_halves_and_remembers() -> None:
    schedule = make_schedule("plateau", total_steps=None)
    for score in (0.5, 0.4, 0.4, 0.4):
        schedule.observe(score)
    assert schedule.factor(5) == 0.5
    again = make_schedule("plateau", total_steps=None)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert again.factor(5) == 0.5

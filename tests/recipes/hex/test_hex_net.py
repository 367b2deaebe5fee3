"""Hex nets: plan, inputs, outputs and loss terms."""

import numpy as np
import pytest
import torch

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch
from whet.device.cpu import CpuDevice
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.recipes.hex.architecture import HexArch, count_parameters
from whet.recipes.hex.config import HexConfig, describe_hex
from whet.recipes.hex.data import to_columns, with_half_turns
from whet.recipes.hex.evaluation import merge_metrics, metrics, partial_metrics
from whet.recipes.hex.game.games import Samples
from whet.recipes.hex.game.rules import Positions
from whet.recipes.hex.game.symmetry import MIRRORED, mover_view, transform, transform_policy
from whet.recipes.hex.model import HexNet, LossWeights, encode_boards, hex_loss, policy_losses, value_losses
from whet.recipes.hex.net_players import NetPlayer
from whet.step.model_contexts import find_blocks
from whet.training.workload import measure_activation_bytes

pytestmark = pytest.mark.torch

ARCHS = (
    HexArch(),
    HexArch(depth=2, width=12, activation="relu", norm="batch"),
    HexArch(depth=3, width=16, block="bottleneck", activation="gelu"),
    HexArch(depth=4, width=8, kind="attention", heads=2, activation="mish"),
    HexArch.model_validate({"preset": 18, "width": 16}),
    HexArch.model_validate({"preset": 50, "width": 32, "depth": 2}),
)


def some_micro(count: int, *, size: int = 5, seed: int = 0) -> MicroBatch:
    """Random boards, a legal move on most of them, none on the others; the last board is full."""
    draw = np.random.default_rng(seed)
    boards = draw.choice(3, (count, size, size), p=(0.6, 0.2, 0.2)).astype(np.int8)
    boards[:, 0, 0] = 0
    moves = np.where(draw.random(count) < 0.8, 0, -1)
    boards[-1], moves[-1] = 1, -1
    movers = draw.choice((1, 2), count).astype(np.int8)
    return MicroBatch(fields=to_columns(samples(boards, movers, moves, draw.random(count) < 0.5)), ids=np.arange(count))


def samples(boards: np.ndarray, movers: np.ndarray, moves: np.ndarray, results: np.ndarray) -> Samples:
    return Samples(Positions(boards, movers), moves, results.astype(np.float32))


def a_net() -> HexNet:
    torch.manual_seed(0)
    net = HexNet(HexArch(depth=2, width=16))
    for parameter in (*net.policy.parameters(), *net.value_out.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    return net


@pytest.mark.parametrize("arch", ARCHS)
def test_plan_has_exact_parameters_and_approximate_memory(arch: HexArch) -> None:
    net = HexNet(arch)
    config = HexConfig(arch=arch, size=7)
    workload = describe_hex(config)
    assert workload.num_parameters == count_parameters(arch) == sum(p.numel() for p in net.parameters())
    kinds = {type(module).__name__.lower() for module in net.modules()}
    assert workload.has_batchnorm == ("batchnorm2d" in kinds) == ("groupnorm" not in kinds)
    assert arch.activation in kinds
    assert len(find_blocks(net)) == arch.depth, "what activation checkpointing computes again"
    small, large = some_micro(4, size=7), some_micro(8, size=7)
    measured = measure_activation_bytes(
        net, lambda micro: hex_loss(net(micro.board), micro, LossWeights()), small, large, device=CpuDevice()
    )
    assert workload.activation_bytes == pytest.approx(measured, rel=0.15)


def test_explicit_values_override_presets() -> None:
    assert HexArch.model_validate({"preset": 34}).depth == 16
    assert HexArch.model_validate({"preset": 34, "depth": 3}).depth == 3


def test_batchnorm_is_not_split_and_groupnorm_fits_into_memory() -> None:
    """Eight thousand boards of 13 x 13 need far more than 6 GB."""
    machine = load_machine("h200")
    plans = {}
    for norm in ("group", "batch"):
        arch = HexArch.model_validate({"preset": 18, "norm": norm})
        config = HexConfig(size=13, global_batch_size=8192, arch=arch)
        plans[norm] = make_plan(machine, describe_hex(config), overrides={"memory_gb": 6.0})
    assert plans["batch"].micro_batch == 8192
    assert plans["batch"].activation_checkpointing == "on"
    assert plans["group"].micro_batch < 8192
    assert "of 6 GB" in plans["group"].settings["micro_batch"].reason


@pytest.mark.parametrize("size", [3, 5, 9])
def test_net_plays_any_size_on_empty_cells_and_ignores_colors(size: int) -> None:
    player = NetPlayer(a_net().eval(), CpuDevice())
    draw = np.random.default_rng(size)
    boards = draw.choice(3, (6, size, size), p=(0.5, 0.25, 0.25)).astype(np.int8)
    positions = Positions(boards, np.array([1, 2, 1, 2, 1, 2], dtype=np.int8))
    reported, mirrored = player.analyze(positions), player.analyze(transform(positions, MIRRORED))
    assert (reported.policy[boards.reshape(6, -1) != 0] == 0).all()
    np.testing.assert_allclose(reported.policy.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(transform_policy(mirrored.policy, MIRRORED, size=size), reported.policy, atol=1e-6)
    np.testing.assert_allclose(mirrored.value, reported.value, atol=1e-6)
    assert reported.value.std() > 0


def test_nan_outputs_are_an_error() -> None:
    net = HexNet(HexArch(depth=1, width=8))
    with torch.no_grad():
        net.policy.weight.fill_(float("nan"))
    with pytest.raises(WhetError, match="NaN"):
        NetPlayer(net, CpuDevice()).evaluate(np.zeros((1, 3, 3), dtype=np.int8))


def test_averaged_evaluation_is_invariant_under_rotation() -> None:
    player = NetPlayer(a_net().eval(), CpuDevice(), averages_symmetry=True)
    boards = some_micro(5).board.numpy()[:4]
    shares, win = player.evaluate(boards)
    other_shares, other_win = player.evaluate(boards[:, ::-1, ::-1])
    np.testing.assert_allclose(other_shares[:, ::-1], shares, atol=1e-6)
    np.testing.assert_allclose(other_win, win, atol=1e-6)


def test_final_positions_train_only_the_value_and_full_boards_are_finite() -> None:
    net, micro = a_net(), some_micro(12)
    decided = MicroBatch(fields={**micro.fields, "move": torch.full((12,), -1)}, ids=micro.ids)
    hex_loss(net(decided.board), decided, LossWeights()).backward()
    assert net.policy.weight.grad.abs().max() == 0
    assert net.value_out.weight.grad.abs().max() > 0
    hex_loss(net(micro.board), micro, LossWeights()).backward()
    assert net.policy.weight.grad.abs().max() > 0
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


def test_each_loss_weight_affects_only_its_term() -> None:
    """The total loss is the weighted sum of its terms; the uncertainty affects only itself."""
    net, micro = a_net(), some_micro(12)
    reported = net(micro.board)
    parts = [
        hex_loss(reported, micro, LossWeights(policy=p, value=v, uncertainty=u))
        for p, v, u in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    whole = hex_loss(reported, micro, LossWeights(policy=2.0, value=3.0, uncertainty=0.5))
    torch.testing.assert_close(parts[0], policy_losses(reported, micro).mean())
    torch.testing.assert_close(parts[1], value_losses(reported, micro).mean())
    torch.testing.assert_close(whole, 2 * parts[0] + 3 * parts[1] + 0.5 * parts[2])
    gradient = torch.autograd.grad(parts[2], (reported.value, reported.policy), allow_unused=True)
    assert all(part is None or part.abs().max() == 0 for part in gradient)


def test_visits_on_one_move_equal_that_move_as_target() -> None:
    net, micro = a_net(), some_micro(12)
    has_move = micro.move >= 0
    shares = torch.nn.functional.one_hot(micro.move.clamp(min=0), 25) * has_move[:, None]
    searched = MicroBatch(fields={**micro.fields, "shares": shares.float()}, ids=micro.ids)
    reported = net(micro.board)
    torch.testing.assert_close(hex_loss(reported, searched, LossWeights()), hex_loss(reported, micro, LossWeights()))


def test_half_turns_are_rotated_positions() -> None:
    given = some_micro(6).fields
    both = with_half_turns(dict(given))
    for row in range(6):
        board, turned = both["board"][row].numpy(), both["board"][row + 6].numpy()
        assert (board[::-1, ::-1] == turned).all()
        before, after = int(both["move"][row]), int(both["move"][row + 6])
        assert (before, after) == (-1, -1) or before + after == 24
        assert both["win"][row] == both["win"][row + 6]


def test_columns_are_in_the_movers_perspective() -> None:
    """Red to move, its stone at the top right, blue's at b1: red sees itself at the left below, and wins."""
    board = np.zeros((1, 3, 3), dtype=np.int8)
    board[0, 0, 2], board[0, 0, 1] = 2, 1
    given = samples(board, np.array([2], dtype=np.int8), np.array([5]), np.array([1]))
    made = to_columns(given)
    assert made["board"][0].tolist() == [[0, 0, 0], [2, 0, 0], [1, 0, 0]]
    assert made["board"][0].tolist() == mover_view(given.positions)[0].boards[0].tolist()
    assert (int(made["move"][0]), float(made["win"][0])) == (7, 1.0)


def test_input_planes_have_the_mover_first() -> None:
    """The mover's stones, the other's; rows at the mover's edges, columns at the other's."""
    board = torch.tensor([[[1, 0, 0], [0, 0, 2], [0, 0, 0]]], dtype=torch.int8)
    own, others, rows, lines = encode_boards(board, like=torch.zeros(1))[0].tolist()
    assert own == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert others == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert rows == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert lines == [[1, 0, 1], [1, 0, 1], [1, 0, 1]]


def test_metrics_match_their_definitions() -> None:
    result = metrics([np.array([0, 4, 5, -1])], [np.array([0.9, 0.2, 0.5, 0.6])], [np.array([1.0, 0.0, 1.0, 0.0])])
    assert result["policy_top1"] == pytest.approx(1 / 3)
    assert result["policy_top5"] == pytest.approx(2 / 3)
    assert result["value_accuracy"] == pytest.approx(2.5 / 4)
    assert result["brier"] == pytest.approx((0.01 + 0.04 + 0.25 + 0.36) / 4)
    assert result["calibration_error"] == pytest.approx((0.1 + 0.2 + 0.5 + 0.6) / 4)


def test_uniform_policy_has_zero_top1() -> None:
    net = HexNet(HexArch(depth=1, width=8))
    torch.nn.init.zeros_(net.policy.weight)
    with torch.no_grad():
        assert merge_metrics([partial_metrics(net, iter([some_micro(20)]))])["policy_top1"] == 0

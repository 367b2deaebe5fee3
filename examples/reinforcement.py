"""Reinforcement learning with manual steps: REINFORCE in a small maze without walls.

A manual step is your own: you play, call backward() and step the optimizer. whet moves the batch to the device, counts,
logs, saves and resumes. The policy, the baseline (a buffer) and torch's random state are saved, so that a resumed run
plays the same games.

python examples/reinforcement.py runs/reinforcement
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whet

SIZE, MAX_MOVES = 6, 20
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * SIZE, 64), nn.Tanh(), nn.Linear(64, len(MOVES)))
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, places):
        return self.net(nn.functional.one_hot(places, SIZE).flatten(1).float())


def play(policy, places):
    """Walk from the given places to the corner (0, 0). Return the log probabilities of the moves and the rewards."""
    moves = MOVES.to(places.device)
    log_probs, rewards = [], []
    is_there = (places == 0).all(1)
    for _ in range(MAX_MOVES):
        logits = policy(places).log_softmax(1)
        chosen = torch.multinomial(logits.exp(), 1)
        log_probs.append(logits.gather(1, chosen)[:, 0] * ~is_there)
        rewards.append(-0.1 * (~is_there).float())
        stepped = (places + moves[chosen[:, 0]]).clamp(0, SIZE - 1)
        places = torch.where(is_there[:, None], places, stepped)
        is_there = is_there | (places == 0).all(1)
    return torch.stack(log_probs, 1), torch.stack(rewards, 1)


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
# The data of a run are the starts of its games: every place of the maze.
starts = torch.cartesian_prod(torch.arange(SIZE), torch.arange(SIZE))
loader = DataLoader(TensorDataset(starts), batch_size=len(starts), shuffle=True)

run = sys.argv[1] if len(sys.argv) > 1 else "runs/reinforcement"
with whet.Session(policy, optimizer, loader, epochs=150, eval_every=50, run=run) as session:
    for batch in session:
        with session.manual(batch) as data:
            (places,) = data
            log_probs, rewards = play(policy, places)
            returns = rewards.flip(1).cumsum(1).flip(1)
            loss = -(log_probs * (returns - policy.baseline)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            policy.baseline.lerp_(returns[:, 0].mean(), 0.1)
            session.log_loss(loss)
        if session.due("evaluate"):
            with torch.no_grad():
                _, rewards = play(policy, starts.to(policy.baseline.device))
            session.log(score=rewards.sum(1).mean())

if not session.is_finished:
    sys.exit(session.exit_code)
num_moves = -10 * whet.summarize(run).metrics["score"]
print(f"{session.end_reason}: {num_moves:.1f} moves to the corner, {starts.sum() / len(starts):.1f} at least")

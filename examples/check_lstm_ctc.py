"""Check a speech model for a Mac on any computer: MPS has no CTC loss before torch 2.14.

whet check examples/check_lstm_ctc.py --torch 2.13   # exit code 1
whet check examples/check_lstm_ctc.py --torch 2.15   # exit code 0
whet check examples/check_lstm_ctc.py --for cuda     # exit code 0
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import whet


class Speech(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(80, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(512, letters)

    def forward(self, sounds: Tensor) -> Tensor:
        return self.head(self.lstm(sounds)[0]).log_softmax(-1)


def loss(speech: nn.Module, sounds: Tensor, letters: Tensor) -> Tensor:
    scores = speech(sounds).transpose(0, 1)
    num_sounds = torch.full((len(sounds),), sounds.shape[1])
    num_letters = torch.full((len(letters),), letters.shape[1])
    return functional.ctc_loss(scores, letters, num_sounds, num_letters)


def model():
    return Speech(letters=29), (torch.randn(8, 50, 80), torch.randint(1, 29, (8, 12))), loss


if __name__ == "__main__":
    for finding in whet.check(model, device="mps", torch="2.13").findings:
        print(f"{finding.severity}, line {finding.place.line}: {finding.what}")

"""Train with the dispersion loss in a plain PyTorch loop: a small byte-level
transformer on the texts of pydoc.

    python examples/plain_loop.py                # with dispersion, 10 s on a CPU
    python examples/plain_loop.py --coeff 0      # without

You only need a model that returns the outputs of its blocks. The one import from
titan_disp is ``titan_disp.dispersion``, which needs only PyTorch.
"""

import argparse
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from titan_disp.dispersion import dispersion_losses

VOCABULARY = 256  # bytes


class Transformer(nn.Module):
    def __init__(self, seq_len: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N, V] and each block's output [B, N, F] for tokens [B, N].
        The last output is before the final norm.
        """
        n = tokens.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(n, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:n]
        hidden = []
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
            hidden.append(x)
        return self.output(self.norm(x)), hidden


class Row(NamedTuple):
    """The measurements of a step."""

    step: int
    cross_entropy: float
    dispersion: float
    cosine: float  # mean over all pairs of tokens of the last block's output


def mean_cosine(z: Tensor) -> Tensor:
    """Return the mean cosine over all pairs of different tokens of z [B, N, F]."""
    u = nn.functional.normalize(z.detach(), dim=-1)
    n = u.shape[1]
    return ((u.sum(1).square().sum(-1) - n) / (n * (n - 1))).mean()


def train(
    steps: int,
    coeff: float,
    batch_size: int,
    seq_len: int,
    width: int,
    depth: int,
    every: int,
) -> list[Row]:
    torch.manual_seed(0)
    text = torch.frombuffer(
        bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8
    ).long()
    model = Transformer(seq_len, width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - seq_len, (batch_size, 1))
        batch = text[starts + torch.arange(seq_len + 1)]
        logits, hidden = model(batch[:, :-1])
        ce = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        # dispersion_losses returns [layers, B]: a value for every layer and sequence.
        dispersion = dispersion_losses(hidden).mean()
        (ce + coeff * dispersion).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % every == 0:
            rows.append(
                Row(step, ce.item(), dispersion.item(), mean_cosine(hidden[-1]).item())
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--coeff",
        type=float,
        default=0.1,
        help="λ; with 0, dispersion is measured but not trained on",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument(
        "--every", type=int, default=20, help="steps between two lines of output"
    )
    for row in train(**vars(parser.parse_args())):
        print(
            "step {:4}  cross-entropy {:.3f}  dispersion {:.4f}  mean cosine {:.3f}".format(
                *row
            )
        )


if __name__ == "__main__":
    main()

"""This is GPT-2 with a forward that can return intermediate activations.

Queries, keys and values have separate matrices. Tensor parallelism shards heads, and would give one rank the queries
and another the values of a fused matrix. Hugging Face's files have them fused (see ``hf.py``). There is no dropout, as
is usual in pre-training today.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.model import AttentionMasksType

from titan_disp.gpt2.flavors import GPT2DispModelArgs
from titan_disp.models.model import DispModel


class Attention(nn.Module):
    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.dim)
        self.wk = nn.Linear(args.dim, args.dim)
        self.wv = nn.Linear(args.dim, args.dim)
        self.wo = nn.Linear(args.dim, args.dim)
        self.inner_attention = ScaledDotProductAttentionWrapper()

    def forward(self, x: Tensor) -> Tensor:
        # [B, N, this rank's heads × head_dim] → [B, heads, N, head_dim]
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.inner_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim)
        self.w2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    moe_enabled = False  # TorchTitan's apply_compile reads it

    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class GPT2DispModel(DispModel):
    model_args: GPT2DispModelArgs

    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__(args)
        self.model_args, self.n_layers = args, args.n_layers
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.context, args.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_weights()

    @property
    def embeddings(self) -> list[nn.Module]:
        return [self.tok_embeddings, self.pos_embeddings]

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:  # context parallelism passes the positions of this rank's tokens
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.tok_embeddings(tokens) + self.pos_embeddings(positions)

    def run_block(
        self, block: nn.Module, h: Tensor, attention_masks: AttentionMasksType | None, positions: Tensor | None
    ) -> Tensor:
        return block(h)

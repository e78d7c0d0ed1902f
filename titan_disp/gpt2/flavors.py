"""These are the model arguments and the flavors of ``gpt2_disp``."""

from dataclasses import dataclass

import torch

from titan_disp.models.arguments import DispModelArgs, Flavors, Initial


@dataclass
class GPT2DispModelArgs(DispModelArgs):
    """The arguments are GPT-2's sizes; the defaults are those of 124M.

    Attributes:
        context: rows of the table of positions, the length of the longest sequence.
        max_seq_len: tokens of a training sequence, at most ``context``.
        activations: indices as ``DispModel.forward`` takes them; empty: only logits.
    """

    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    hidden_dim: int = 3072
    vocab_size: int = 50257
    context: int = 1024
    max_seq_len: int = 1024
    norm_eps: float = 1e-5
    enable_weight_tying: bool = True
    activations: tuple[int, ...] = ()

    @property
    def n_kv_heads(self) -> int:  # type: ignore[override]
        return self.n_heads

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.dim // self.n_heads

    @property
    def max_positions(self) -> int:
        return self.context

    def initial(self, name: str, shape: torch.Size) -> Initial:
        """Initialize as the GPT-2 paper and transformers do.

        The standard deviation is 0.02, and less for the 2·n_layers products that add to the residual stream.
        """
        if len(shape) == 1:
            return Initial(mean=0.0 if name.endswith("bias") else 1.0)
        residual = name.endswith(("wo.weight", "w2.weight"))
        return Initial(std=0.02 / (2 * self.n_layers) ** 0.5 if residual else 0.02)

    def saved_elements(self, tp: int) -> dict[str, float]:
        d, h = self.dim, self.hidden_dim
        return {
            # Both residuals; both normalized inputs; q, k, v and the attention's output; w1's output and its GELU.
            "none": 2 * d / tp + 2 * d + (4 * d + 2 * h) / tp,
            # The block's input and the outputs of attention and of all products (parallelize.py) are kept. Under TP,
            # the outputs of wo and w2 are partial sums over the whole sequence, and both reduce-scattered results are
            # kept too.
            "op": d / tp + (4 * d + h) / tp + 2 * d + (2 * d / tp if tp > 1 else 0),
            "full": d / tp,
        }


def _untied(args: GPT2DispModelArgs) -> GPT2DispModelArgs:
    args.enable_weight_tying = False
    return args


def _nano() -> GPT2DispModelArgs:
    """Return a model of 0.5 M parameters for tests on a CPU.

    Its 2,049 tokens leave a remainder of 1 when they are divided among 2, 4, 8, … ranks, as GPT-2's 50,257 do.
    """
    return GPT2DispModelArgs(dim=64, n_layers=6, n_heads=4, hidden_dim=256, vocab_size=2049)


# In ascending order. Table 2 of the GPT-2 paper (Radford et al., 2019) calls them 117M to 1542M; the names here count
# all parameters. Numbers of heads are from config.json of openai-community/gpt2, -medium, -large and -xl;
# tests/test_gpt2.py compares them.
flavors = Flavors(
    {
        "nano": _nano(),
        "nano_untied": _untied(_nano()),
        "124M": GPT2DispModelArgs(),
        "355M": GPT2DispModelArgs(dim=1024, n_layers=24, n_heads=16, hidden_dim=4096),
        "774M": GPT2DispModelArgs(dim=1280, n_layers=36, n_heads=20, hidden_dim=5120),
        "1.5B": GPT2DispModelArgs(dim=1600, n_layers=48, n_heads=25, hidden_dim=6400),
    }
)

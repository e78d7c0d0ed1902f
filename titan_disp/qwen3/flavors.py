"""These are the model arguments and the flavors of ``qwen3_disp``."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from titan_disp.models.arguments import DispModelArgs, Flavors, Initial


@dataclass
class Qwen3DispModelArgs(DispModelArgs, Qwen3ModelArgs):
    """Extend TorchTitan's Qwen3 arguments with the activations that a training forward returns.

    Attributes:
        activations: indices as ``DispModel.forward`` takes them; empty: only logits.
    """

    activations: tuple[int, ...] = ()

    not_overridable: ClassVar[dict[str, str]] = {
        "qk_norm": "Hugging Face's Qwen3 always normalizes queries and keys, so an export would be a different model",
        "eos_id": "the tokenizer defines it",
        "moe_enabled": "the model is dense",
        "moe_inter_dim": "the model is dense",
    }

    def initial(self, name: str, shape: torch.Size) -> Initial:
        """Initialize as TorchTitan 0.2.2's Qwen3 does."""
        if len(shape) == 1:
            return Initial(mean=1.0)  # every vector in Qwen3 is an RMSNorm weight
        if name in ("tok_embeddings.weight", "output.weight"):
            if name == "tok_embeddings.weight" and not self.enable_weight_tying:
                return Initial(std=1.0)
            std = self.dim**-0.5
            return Initial(std=std, cut=3 * std)
        layer = int(name.split(".")[1]) if self.depth_init else self.n_layers - 1
        if name.endswith(("wo.weight", "w2.weight", "w3.weight")):
            return Initial(std=0.02 / (2 * (layer + 1)) ** 0.5, cut=2.0)
        return Initial(std=0.02, cut=2.0)

    def saved_elements(self, tp: int) -> dict[str, float]:
        d, h = self.dim, self.hidden_dim
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            # Both residuals; both normalized inputs; q and k before their norm; q, k, v and the attention's output;
            # w1's output, its SiLU, w3's output and their product.
            "none": 2 * d / tp + 2 * d + (3 * q + 3 * kv + 4 * h) / tp,
            # The block's input, the attention's output and every second product (q, v, w1, w2) are kept. Under TP, w2's
            # output is a partial sum over the whole sequence, and both reduce-scattered results are kept too.
            "op": d / tp + (2 * q + kv + h) / tp + d + (2 * d / tp if tp > 1 else 0),
            "full": d / tp,
        }


def _like_torchtitan(name: str, **changes: Any) -> Qwen3DispModelArgs:
    return Qwen3DispModelArgs(**(vars(copy.deepcopy(qwen3_args[name])) | changes))


# In ascending order. TorchTitan registers Qwen's published sizes: Table 1 of the Qwen3 technical report (arXiv
# 2505.09388) and config.json of Qwen/Qwen3-*; tests/test_qwen3.py compares them. Embeddings are tied up to 4B.
flavors = Flavors(
    {
        "nano": Qwen3DispModelArgs(  # 0.4 M parameters: for the demo and tests on a CPU
            vocab_size=2048,
            max_seq_len=4096,
            head_dim=16,
            dim=64,
            n_layers=6,
            n_heads=4,
            n_kv_heads=2,
            qk_norm=True,
            hidden_dim=192,
            rope_theta=1000000,
            enable_weight_tying=True,
        ),
        "debugmodel": _like_torchtitan("debugmodel"),
        # For a preflight of untied models on a CPU.
        "debugmodel_untied": _like_torchtitan("debugmodel", enable_weight_tying=False),
        "0.6B": _like_torchtitan("0.6B"),
        # The model that the authors' TorchTitan fork trained: by accident, as they say, FSDP untied the embedding.
        "0.6B_untied": _like_torchtitan("0.6B", enable_weight_tying=False),
        "1.7B": _like_torchtitan("1.7B"),
        "4B": _like_torchtitan("4B"),
        "8B": _like_torchtitan("8B"),
        "14B": _like_torchtitan("14B"),
        "32B": _like_torchtitan("32B"),
    }
)

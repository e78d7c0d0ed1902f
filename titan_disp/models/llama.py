"""``llama_disp`` is Hugging Face's Llama: Qwen3 without norms of queries and keys, and
with Llama 3.1's scaling of rotary embeddings.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import precompute_freqs_cis

from titan_disp.models.arguments import Flavors
from titan_disp.models.qwen3 import (
    Qwen3DispModel,
    Qwen3DispModelArgs,
    Qwen3HfAdapter,
)


@dataclass
class LlamaDispModelArgs(Qwen3DispModelArgs):
    """The arguments of a Llama. The defaults are those of SmolLM2, of which only the
    size 1.7B has another rope_theta.

    Weights are initialized as in Qwen3 and in TorchTitan's Llama 3.
    """

    head_dim: int = 64
    vocab_size: int = 49152
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    rope_theta: float = 100000
    enable_weight_tying: bool = True
    qk_norm: bool = False
    # Llama 3.1 divides the low frequencies of its rotary embeddings by this factor, for
    # longer sequences than in its first training. A factor of 1 changes no frequency.
    rope_factor: float = 1.0


# The tokens per sequence in the first part of Llama 3.1's training. This and the other
# numbers of the scaling are TorchTitan's defaults (``RoPEScalingArgs``).
ORIGINAL_SEQ_LEN = 8192
LLAMA_3_SCALING = {  # in config.json, without the factor
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_SEQ_LEN,
}

_nano = LlamaDispModelArgs(  # 0.4 M parameters: for tests on a CPU
    dim=64,
    hidden_dim=192,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=2048,
)
SIZES_OF_LLAMA_3: dict[str, Any] = {  # the arguments that all Llama 3 sizes share
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "max_seq_len": 131072,
    "rope_theta": 500000,
}

# In ascending order, by their names on the hub. The numbers of HuggingFaceTB/SmolLM2-*,
# TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T and meta-llama/Llama-* are from
# copies and from memory, and were not compared with config.json on the hub. An import
# refuses a folder whose config.json differs.
flavors = Flavors(
    {
        "nano": _nano,
        # For a preflight of untied models on a CPU.
        "nano_untied": replace(_nano, enable_weight_tying=False),
        "SmolLM2-135M": LlamaDispModelArgs(
            dim=576, hidden_dim=1536, n_layers=30, n_heads=9, n_kv_heads=3
        ),
        "SmolLM2-360M": LlamaDispModelArgs(
            dim=960, hidden_dim=2560, n_layers=32, n_heads=15, n_kv_heads=5
        ),
        "TinyLlama-1.1B": LlamaDispModelArgs(
            dim=2048,
            hidden_dim=5632,
            n_layers=22,
            n_heads=32,
            n_kv_heads=4,
            vocab_size=32000,
            max_seq_len=2048,
            rope_theta=10000,
            enable_weight_tying=False,
        ),
        "Llama-3.2-1B": LlamaDispModelArgs(
            **SIZES_OF_LLAMA_3,
            dim=2048,
            hidden_dim=8192,
            n_layers=16,
            n_heads=32,
            rope_factor=32.0,
        ),
        "SmolLM2-1.7B": LlamaDispModelArgs(
            dim=2048,
            hidden_dim=8192,
            n_layers=24,
            n_heads=32,
            n_kv_heads=32,
            rope_theta=130000,
        ),
        "Llama-3.2-3B": LlamaDispModelArgs(
            **SIZES_OF_LLAMA_3,
            dim=3072,
            hidden_dim=8192,
            n_layers=28,
            n_heads=24,
            head_dim=128,
            rope_factor=32.0,
        ),
        "Llama-3.1-8B": LlamaDispModelArgs(
            **SIZES_OF_LLAMA_3,
            dim=4096,
            hidden_dim=14336,
            n_layers=32,
            n_heads=32,
            head_dim=128,
            rope_factor=8.0,
            enable_weight_tying=False,
        ),
    }
)


class LlamaDispModel(Qwen3DispModel):
    model_args: LlamaDispModelArgs

    def _precompute_rope_cache(self) -> Tensor:
        """Return cosines and sines, float32 [max_seq_len, 2 · head_dim]. TorchTitan's
        Qwen3 and Hugging Face have the same layout.
        """
        args = self.model_args
        # [max_seq_len, head_dim / 2] complex. A factor of 1 changes nothing.
        waves = precompute_freqs_cis(
            dim=args.head_dim,
            end=args.max_seq_len,
            theta=args.rope_theta,
            scaling_args=RoPEScalingArgs(scaling_factor=args.rope_factor),
        )
        return torch.cat([waves.real, waves.real, waves.imag, waves.imag], dim=-1)


class LlamaHfAdapter(Qwen3HfAdapter):
    model_cls = LlamaDispModel
    model_args: LlamaDispModelArgs
    transformers_class = "LlamaForCausalLM"
    model_type = "llama"
    defaults = {  # the defaults of transformers, for keys that a config.json omits
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    def architecture(self) -> dict[str, Any]:
        shared = super().architecture()
        factor = self.model_args.rope_factor
        if factor == 1:
            return shared
        return shared | {"rope_scaling": LLAMA_3_SCALING | {"factor": factor}}

    def extras(self) -> dict[str, Any]:
        trained = self.model_args.max_seq_len
        positions = trained
        if self.model_args.rope_factor != 1:
            # Otherwise, transformers warns that this is not above the original length.
            positions = max(trained, 2 * ORIGINAL_SEQ_LEN)
        return {
            "max_position_embeddings": positions,
            "trained_seq_len": trained,  # a key of titan-disp
        }

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        # If config.json lacks a size, the comparison with the model refuses it later.
        heads = config.get("num_attention_heads", 1)
        implied = {
            "num_key_value_heads": heads,
            "head_dim": config.get("hidden_size", 0) // heads,
        }
        return super().stated(implied | config)

"""``qwen3_disp`` is TorchTitan's Qwen3 with a forward that can return activations."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.infra.parallelize import (
    _op_sac_save_list,
    apply_non_moe_tp,
)
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model import AttentionMasksType

from titan_disp.config.types import JobConfig
from titan_disp.models.arguments import DispModelArgs, Flavors, Initial
from titan_disp.models.decoder import DispModel
from titan_disp.models.hf import HfAdapter


@dataclass
class Qwen3DispModelArgs(DispModelArgs, Qwen3ModelArgs):
    activations: tuple[int, ...] = ()

    not_overridable: ClassVar[dict[str, str]] = {
        "qk_norm": "Hugging Face's Qwen3 always normalizes queries and keys, and its Llama never does: model.name decides",
        "eos_id": "the tokenizer defines it",
        "moe_enabled": "the model is dense",
        "moe_inter_dim": "the model is dense",
    }

    def initial(self, name: str, shape: torch.Size) -> Initial:
        # The same as in TorchTitan 0.2.2's Qwen3
        if len(shape) == 1:
            return Initial(mean=1.0)  # every vector in Qwen3 is an RMSNorm weight
        if name in ("tok_embeddings.weight", "output.weight"):
            if name == "tok_embeddings.weight" and not self.enable_weight_tying:
                return Initial(std=1.0)
            std = self.dim**-0.5
            return Initial(std=std, cut=3 * std)
        layer = self.n_layers - 1
        if self.depth_init:
            layer = int(name.split(".")[1])
        if name.endswith(("wo.weight", "w2.weight", "w3.weight")):
            return Initial(std=0.02 / (2 * (layer + 1)) ** 0.5, cut=2.0)
        return Initial(std=0.02, cut=2.0)

    def saved_elements(self, tp: int) -> dict[str, float]:
        d = self.dim
        h = self.hidden_dim
        q = self.n_heads * self.head_dim
        kv = self.n_kv_heads * self.head_dim
        copies = 3 if self.qk_norm else 2
        reduced = 2 * d / tp if tp > 1 else 0
        return {
            # Saved: both residuals; both normalized inputs; q and k before their norm,
            # if they have one; q, k, v and the attention's output; w1's output, its
            # SiLU, w3's output, and the product of SiLU and w3's output
            "none": 2 * d / tp + 2 * d + (copies * (q + kv) + 4 * h) / tp,
            # Saved: the block's input, the attention's output, and the output of every
            # second matrix product (q, v, w1, w2). Under TP, w2's output is a partial
            # sum over the whole sequence; the reduce-scattered outputs of wo and w2 are
            # saved too.
            "op": d / tp + (2 * q + kv + h) / tp + d + reduced,
            "full": d / tp,
            # Gradients of the feed-forward's output and of the two factors in it
            "gradients": d + 2 * h / tp,
        }


def _like_torchtitan(name: str, **changes: Any) -> Qwen3DispModelArgs:
    return Qwen3DispModelArgs(**(vars(copy.deepcopy(qwen3_args[name])) | changes))


# In ascending order. TorchTitan registers Qwen's published sizes: Table 1 of the Qwen3
# technical report (arXiv 2505.09388) and config.json of Qwen/Qwen3-*;
# tests/test_models.py compares them. Embeddings are tied up to 4B.
flavors = Flavors(
    {
        "nano": Qwen3DispModelArgs(  # 0.4 M parameters: for the demo and tests on a CPU
            vocab_size=2048,
            head_dim=16,
            dim=64,
            n_layers=6,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=192,
            enable_weight_tying=True,
        ),
        "debugmodel": _like_torchtitan("debugmodel"),
        # For a preflight of untied models on a CPU
        "debugmodel_untied": _like_torchtitan("debugmodel", enable_weight_tying=False),
        "0.6B": _like_torchtitan("0.6B"),
        # The model that the authors trained with their TorchTitan fork. They write that
        # FSDP untied the embedding by accident.
        "0.6B_untied": _like_torchtitan("0.6B", enable_weight_tying=False),
        **{name: _like_torchtitan(name) for name in ("1.7B", "4B", "8B", "14B", "32B")},
    }
)


class Qwen3DispModel(DispModel, Qwen3Model):
    model_args: Qwen3DispModelArgs
    rope_cache: Tensor

    def run_block(
        self,
        block: nn.Module,
        h: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None,
    ) -> Tensor:
        return block(h, self.rope_cache, attention_masks, positions)

    def init_buffers(self, device: torch.device | None = None) -> None:
        with torch.device(device or self.rope_cache.device):
            self.rope_cache = self._precompute_rope_cache()


SAVED_OPS = _op_sac_save_list


def apply_tp(
    model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    recipe = job_config.quantize.linear.float8.recipe_name
    # The plan names norms that Llama does not have.
    warnings.filterwarnings("ignore", r"Parallelize plan key '[qk]_norm'")
    apply_non_moe_tp(
        model,
        parallel_dims.get_mesh("tp"),
        loss_parallel=not job_config.parallelism.disable_loss_parallel,
        # Rowwise float8 recipes all-gather in high precision, so they use ordinary TP.
        # TorchTitan 0.2.2 looks for a converter called "float8", which does not exist.
        enable_float8_tensorwise_tp="quantize.linear.float8"
        in job_config.model.converters
        and recipe not in ("rowwise", "rowwise_with_gw_hp"),
        enable_async_tp=job_config.parallelism.enable_async_tensor_parallel,
        # The plan needs to know whether the blocks get positions.
        cp_enabled=parallel_dims.cp_enabled or model.model_args.restart_positions,
    )


class Qwen3HfAdapter(HfAdapter, Qwen3StateDictAdapter):
    model_cls = Qwen3DispModel
    model_args: Qwen3DispModelArgs
    transformers_class = "Qwen3ForCausalLM"
    embedding = "model.embed_tokens.weight"
    model_type = "qwen3"
    defaults = {
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
    }
    arguments = {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "head_dim": "head_dim",
        "rms_norm_eps": "norm_eps",  # for queries and keys too
        # At the top level, as in Qwen's files, where transformers 4.51 to 5 read it
        "rope_theta": "rope_theta",
        "tie_word_embeddings": "enable_weight_tying",
    }

    def extras(self) -> dict[str, Any]:
        # transformers 4.51 warns if sliding_window is missing.
        return {
            "max_position_embeddings": self.model_args.max_seq_len,
            "sliding_window": None,
        }

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().stated(config)
        # transformers 5 writes rope_parameters, and earlier releases write rope_scaling.
        rope = config.get("rope_parameters") or config["rope_scaling"] or {}
        config["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
        # The type "default" means no scaling.
        config["rope_scaling"] = {
            key: value
            for key, value in rope.items()
            if key != "rope_theta" and value != "default"
        } or None
        return config

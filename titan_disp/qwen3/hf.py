"""This module converts Qwen3 to Hugging Face's keys in config.json. TorchTitan's adapter converts the weights."""

from typing import Any

from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from titan_disp.models.hf import HfAdapter
from titan_disp.qwen3.flavors import Qwen3DispModelArgs
from titan_disp.qwen3.model import Qwen3DispModel


def architecture(args: Qwen3DispModelArgs) -> dict[str, Any]:
    """Return ``HfAdapter.architecture`` for Qwen3.

    ``rope_theta`` is at the top level, as in Qwen's own files: transformers 4.51 to 5 read it there.
    """
    return {
        "model_type": "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,  # of queries and keys too
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": args.enable_weight_tying,
    }


class Qwen3HfAdapter(HfAdapter, Qwen3StateDictAdapter):
    """Use TorchTitan's conversion of Qwen3's weights."""

    model_cls = Qwen3DispModel
    model_args: Qwen3DispModelArgs
    transformers_class = "Qwen3ForCausalLM"
    defaults = {"rope_scaling": None, "attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}

    def architecture(self) -> dict[str, Any]:
        return architecture(self.model_args)

    def extras(self) -> dict[str, Any]:
        # transformers 4.51 warns if sliding_window is absent
        return {"max_position_embeddings": self.model_args.max_seq_len, "sliding_window": None}

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return config.json with RoPE in the keys of ``architecture``.

        transformers 5 writes ``rope_parameters`` instead.
        """
        config = super().stated(config)
        rope = config.get("rope_parameters")
        if not isinstance(rope, dict):
            return config
        plain = rope.get("rope_type", "default") == "default"
        return config | {"rope_theta": rope.get("rope_theta"), "rope_scaling": None if plain else rope}

"""This module converts GPT-2 to Hugging Face's keys in config.json, and to its names and layouts of weights.

Its linear layers are Conv1D, whose matrices are the transposes of nn.Linear's. Queries, keys and values are one layer,
c_attn.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.futures import Future

from titan_disp.gpt2.flavors import GPT2DispModelArgs
from titan_disp.gpt2.model import GPT2DispModel
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.hf import HfAdapter

# fmt: off
OUTSIDE = {
    "tok_embeddings.weight": "transformer.wte.weight", "pos_embeddings.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
NORMS = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
PRODUCTS = {"attention.wo": "attn.c_proj", "feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj"}
FUSED, PARTS = "attn.c_attn", ("attention.wq", "attention.wk", "attention.wv")
# fmt: on


class GPT2HfAdapter(HfAdapter):
    """Convert to the weights of Hugging Face's GPT2LMHeadModel. The hub's own files omit the prefix "transformer."."""

    model_cls = GPT2DispModel
    model_args: GPT2DispModelArgs
    transformers_class = "GPT2LMHeadModel"
    defaults = {
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, model_args: DispModelArgs, hf_assets_path: str | None) -> None:
        self._layouts: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]] = {}  # of weights that to_hf has gathered
        super().__init__(model_args, hf_assets_path)

    def architecture(self) -> dict[str, Any]:
        args = self.model_args
        return {
            "model_type": "gpt2",
            "vocab_size": args.vocab_size,
            "n_positions": args.context,
            "n_embd": args.dim,
            "n_layer": args.n_layers,
            "n_head": args.n_heads,
            "n_inner": args.hidden_dim,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": args.norm_eps,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": args.enable_weight_tying,
        }

    def extras(self) -> dict[str, Any]:
        return {
            "resid_pdrop": 0.0,  # as in training; transformers' default is 0.1
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "trained_seq_len": self.model_args.max_seq_len,  # titan-disp's own key: later rows of wpe were not trained
        }

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().stated(config)
        if config["n_inner"] is None and isinstance(config.get("n_embd"), int):
            return config | {"n_inner": 4 * config["n_embd"]}
        return config

    def canonical(self, name: str) -> str:
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return _Reader(path, self.canonical)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return Hugging Face's weights. This is a collective call if weights are sharded.

        Linear layers come whole and on the CPU if they were sharded; other weights stay as they are.
        """
        found: dict[str, Any] = {}
        for name, value in state_dict.items():
            if name in OUTSIDE:
                if name != "output.weight" or not self.model_args.enable_weight_tying:
                    found[OUTSIDE[name]] = value
                continue
            block, part, kind = _parse(name)
            if part in NORMS:
                found[f"transformer.{block}.{NORMS[part]}.{kind}"] = value
            elif part in PRODUCTS:
                found[f"transformer.{block}.{PRODUCTS[part]}.{kind}"] = _conv(self._whole(name, value))
            elif part == PARTS[0]:
                names = [f"layers.{block.removeprefix('h.')}.{p}.{kind}" for p in PARTS]
                whole = torch.cat([self._whole(n, state_dict[n]) for n in names])
                found[f"transformer.{block}.{FUSED}.{kind}"] = _conv(whole)
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return our weights, sharded as they were before ``to_hf``. Other entries, such as masks, are left out."""
        hf = {self.canonical(name): value for name, value in hf_state_dict.items()}
        found = {ours: hf[theirs] for ours, theirs in OUTSIDE.items() if theirs in hf}
        if self.model_args.enable_weight_tying:
            found["output.weight"] = found["tok_embeddings.weight"]
        for i in range(self.model_args.n_layers):
            for kind in ("weight", "bias"):
                block = f"transformer.h.{i}"
                for part, theirs in NORMS.items():
                    found[f"layers.{i}.{part}.{kind}"] = hf[f"{block}.{theirs}.{kind}"]
                for part, theirs in PRODUCTS.items():
                    self._put(found, [f"layers.{i}.{part}.{kind}"], hf[f"{block}.{theirs}.{kind}"])
                self._put(found, [f"layers.{i}.{part}.{kind}" for part in PARTS], hf[f"{block}.{FUSED}.{kind}"])
        return found

    def _whole(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        self._layouts[name] = value.device_mesh, value.placements
        return value.full_tensor().cpu()  # all weights at once may not fit on a GPU

    def _put(self, found: dict[str, Any], names: list[str], value: Tensor) -> None:
        """Store equal chunks of ``value``, in the linear layer's layout, under each of the names."""
        for name, whole in zip(names, _conv(value).chunk(len(names)), strict=True):
            if name in self._layouts:
                mesh, placements = self._layouts[name]
                whole = whole.contiguous().to(mesh.device_type)
                found[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            else:
                found[name] = whole.contiguous()


def _parse(name: str) -> tuple[str, str, str]:
    """Split layers.3.attention.wq.weight into h.3, attention.wq and weight."""
    matched = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert matched is not None, name
    layer, part, kind = matched.groups()
    return f"h.{layer}", part, kind


def _conv(value: Tensor) -> Tensor:
    """Convert a linear layer's matrix to Conv1D's layout or back. A bias stays as it is."""
    return value.t().contiguous() if value.ndim == 2 else value


class _Reader(HuggingFaceStorageReader):
    """Find weights by their canonical names, whatever the file calls them."""

    def __init__(self, path: str, canonical: Callable[[str], str]) -> None:
        super().__init__(path)
        self._canonical = canonical
        self._in_file: dict[str, str] = {}

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        names: Iterable[str] = metadata.state_dict_metadata
        self._in_file = {self._canonical(name): name for name in names}
        metadata.state_dict_metadata = {
            self._canonical(name): tensor for name, tensor in metadata.state_dict_metadata.items()
        }
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = []
        for item in plan.items:
            index = dataclasses.replace(item.storage_index, fqn=self._in_file[item.storage_index.fqn])
            items.append(dataclasses.replace(item, storage_index=index))
        return super().read_data(dataclasses.replace(plan, items=items), planner)

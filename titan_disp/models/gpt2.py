"""``gpt2_disp`` is GPT-2: arguments and flavors, the model, its tensor-parallel plan, and
the conversion of Hugging Face's weights.

Queries, keys and values have separate matrices, because tensor parallelism would give
one rank the queries and another rank the values of a fused matrix. There is no dropout,
as is usual in pre-training today.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.futures import Future
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.attention import (
    FlexAttentionWrapper,
    ScaledDotProductAttentionWrapper,
)
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list
from torchtitan.protocols.model import AttentionMasksType

from titan_disp.config.types import JobConfig
from titan_disp.models.arguments import DispModelArgs, Flavors, Initial
from titan_disp.models.decoder import DispModel
from titan_disp.models.hf import HfAdapter

logger = logging.getLogger(__name__)  # not for the console: see run.console


@dataclass
class GPT2DispModelArgs(DispModelArgs):
    """The arguments of GPT-2. The defaults are those of the flavor 124M."""

    dim: int = 768
    n_layers: int = 12
    n_heads: int = 12
    hidden_dim: int = 3072
    vocab_size: int = 50257
    context: int = 1024  # the longest sequence: rows of the table of positions
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
        """Return the distribution in the GPT-2 paper and in transformers, which is
        narrower for the 2·n_layers matrices whose products are added to the residual.
        """
        if len(shape) == 1:
            return Initial(mean=0.0 if name.endswith("bias") else 1.0)
        std = 0.02
        if name.endswith(("wo.weight", "w2.weight")):
            std /= (2 * self.n_layers) ** 0.5
        return Initial(std=std)

    def saved_elements(self, tp: int) -> dict[str, float]:
        d = self.dim
        h = self.hidden_dim
        reduced = 2 * d / tp if tp > 1 else 0
        return {
            # Saved: both residuals; both normalized inputs; q, k, v and the attention's
            # output; w1's output and its GELU
            "none": 2 * d / tp + 2 * d + (4 * d + 2 * h) / tp,
            # Saved: the block's input, and the outputs of attention and of all products
            # (SAVED_OPS). Under TP, the outputs of wo and w2 are partial sums over the
            # whole sequence; the reduce-scattered outputs of wo and w2 are saved too.
            "op": d / tp + (4 * d + h) / tp + 2 * d + reduced,
            "full": d / tp,
            # Gradients of the feed-forward's output, of its GELU, and of w1's output
            "gradients": d + 2 * h / tp,
        }


# 0.5 M parameters, for tests on a CPU. The vocabulary of 2,049 tokens leaves a remainder
# of 1 if it is divided among 2, 4, 8, … ranks, like GPT-2's 50,257 tokens.
_nano = GPT2DispModelArgs(
    dim=64, n_layers=6, n_heads=4, hidden_dim=256, vocab_size=2049
)

# In ascending order. Table 2 of the GPT-2 paper (Radford et al., 2019) calls them 117M
# to 1542M; the names here are the numbers of all parameters. The numbers of heads are
# from config.json of openai-community/gpt2, -medium, -large and -xl;
# tests/test_models.py compares them.
flavors = Flavors(
    {
        "nano": _nano,
        "nano_untied": dataclasses.replace(_nano, enable_weight_tying=False),
        "124M": GPT2DispModelArgs(),
        "355M": GPT2DispModelArgs(dim=1024, n_layers=24, n_heads=16, hidden_dim=4096),
        "774M": GPT2DispModelArgs(dim=1280, n_layers=36, n_heads=20, hidden_dim=5120),
        "1.5B": GPT2DispModelArgs(dim=1600, n_layers=48, n_heads=25, hidden_dim=6400),
    }
)


class Attention(nn.Module):
    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(args.dim, args.dim) for _ in range(4)
        )
        self.inner_attention: nn.Module = ScaledDotProductAttentionWrapper()
        if args.attn_type == "flex":
            self.inner_attention = FlexAttentionWrapper()

    def forward(self, x: Tensor, attention_masks: AttentionMasksType | None) -> Tensor:
        # [B, N, this rank's heads × head_dim] → [B, heads, N, head_dim]
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        masks = {} if attention_masks is None else {"block_mask": attention_masks}
        return self.wo(
            self.inner_attention(q, k, v, **masks).transpose(1, 2).flatten(2)
        )


class FeedForward(nn.Module):
    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim)
        self.w2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    moe_enabled = False  # TorchTitan's apply_compile reads this attribute

    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, attention_masks: AttentionMasksType | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attention_masks)
        return x + self.feed_forward(self.ffn_norm(x))


class GPT2DispModel(DispModel):
    model_args: GPT2DispModelArgs

    def __init__(self, args: GPT2DispModelArgs) -> None:
        super().__init__(args)
        self.model_args = args
        self.n_layers = args.n_layers
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.context, args.dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(args) for i in range(args.n_layers)}
        )
        self.norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_weights()

    @property
    def embeddings(self) -> list[nn.Module]:
        return [self.tok_embeddings, self.pos_embeddings]

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        # Context parallelism passes the positions of this rank's tokens, and
        # restart_positions passes the positions of all tokens.
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.tok_embeddings(tokens) + self.pos_embeddings(positions)

    def run_block(
        self,
        block: nn.Module,
        h: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None,
    ) -> Tensor:
        return block(h, attention_masks)


# A linear layer with a bias is aten.addmm. TorchTitan's list has only aten.mm. Its
# policy saves every second output of aten.mm, but all outputs of aten.addmm.
SAVED_OPS = _op_sac_save_list | {torch.ops.aten.addmm.default}


def apply_tp(
    model: DispModel, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Apply TorchTitan's plan for Llama. The table of positions is sharded by rows, so
    that one rank has the whole gradient of a row.
    """
    mesh = parallel_dims.get_mesh("tp")
    loss_parallel = not job_config.parallelism.disable_loss_parallel
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "pos_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None),  # None for the mask
                    desired_input_layouts=(Replicate(), None),
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    maybe_enable_async_tp(job_config, mesh)
    logger.info("Applied Tensor Parallelism to the model")


# Hugging Face's names of weights, by our names. One of Hugging Face's layers may be
# several of ours.
OUTSIDE = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "pos_embeddings.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    ("attention_norm",): "ln_1",
    ("attention.wq", "attention.wk", "attention.wv"): "attn.c_attn",
    ("attention.wo",): "attn.c_proj",
    ("ffn_norm",): "ln_2",
    ("feed_forward.w1",): "mlp.c_fc",
    ("feed_forward.w2",): "mlp.c_proj",
}


class GPT2HfAdapter(HfAdapter):
    """Converts weights to and from Hugging Face's GPT2LMHeadModel.

    That model's Conv1D matrices (c_…) are the transposes of nn.Linear's. Queries, keys
    and values are one layer, c_attn. Files on the hub omit the prefix "transformer.".
    """

    model_cls = GPT2DispModel
    model_args: GPT2DispModelArgs
    transformers_class = "GPT2LMHeadModel"
    model_type = "gpt2"
    embedding = OUTSIDE["tok_embeddings.weight"]
    defaults = {
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    arguments = {
        "vocab_size": "vocab_size",
        "n_positions": "context",
        "n_embd": "dim",
        "n_layer": "n_layers",
        "n_head": "n_heads",
        "n_inner": "hidden_dim",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "enable_weight_tying",
    }

    def __init__(self, model_args: DispModelArgs, hf_assets_path: str | None) -> None:
        # The mesh and the placements of each weight that to_hf has gathered
        self._layouts: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]] = {}
        super().__init__(model_args, hf_assets_path)

    def extras(self) -> dict[str, Any]:
        return {
            "resid_pdrop": 0.0,  # as in training; transformers' default is 0.1
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            # A key of titan-disp: the rows of wpe after this length were not trained.
            "trained_seq_len": self.model_args.max_seq_len,
            "n_ctx": self.model_args.context,  # for llama.cpp
        }

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().stated(config)
        config["n_inner"] = config["n_inner"] or 4 * config.get("n_embd", 0)
        return config

    def canonical(self, name: str) -> str:
        if name.startswith(("transformer.", "lm_head.")):
            return name
        return f"transformer.{name}"

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        return _Reader(path, self.canonical)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return Hugging Face's weights.

        Sharded linear layers are gathered by collective calls, and returned on the CPU.
        """
        weights: dict[str, Any] = {}
        for theirs, ours in self._names():
            if ".c_" in theirs:
                weights[theirs] = _conv(
                    torch.cat([self._gathered(name, state_dict[name]) for name in ours])
                )
            else:
                weights[theirs] = state_dict[ours[0]]
        return weights

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return our weights, sharded as they were before ``to_hf``.

        Other entries, such as masks, are left out.
        """
        hf = {self.canonical(name): value for name, value in hf_state_dict.items()}
        weights: dict[str, Any] = {}
        for theirs, ours in self._names():
            if ".c_" in theirs:
                parts = _conv(hf[theirs]).chunk(len(ours))
                weights |= {
                    name: self._sharded(name, part)
                    for name, part in zip(ours, parts, strict=True)
                }
            else:
                weights[ours[0]] = hf[theirs]
        if self.model_args.enable_weight_tying:
            weights["output.weight"] = weights["tok_embeddings.weight"]
        return weights

    def _names(self) -> Iterator[tuple[str, list[str]]]:
        """Yield Hugging Face's name of each weight, and our names of its parts."""
        for ours, theirs in OUTSIDE.items():
            if ours != "output.weight" or not self.model_args.enable_weight_tying:
                yield theirs, [ours]
        for i, (parts, layer), suffix in product(
            range(self.model_args.n_layers), IN_BLOCK.items(), ("weight", "bias")
        ):
            yield (
                f"transformer.h.{i}.{layer}.{suffix}",
                [f"layers.{i}.{part}.{suffix}" for part in parts],
            )

    def _gathered(self, name: str, value: Tensor) -> Tensor:
        """Return the whole weight, and remember its mesh and placements."""
        if not isinstance(value, DTensor):
            return value
        self._layouts[name] = value.device_mesh, value.placements
        return value.full_tensor().cpu()  # a GPU may be too small for all weights

    def _sharded(self, name: str, value: Tensor) -> Tensor:
        """Return the weight, sharded as it was before ``_gathered``."""
        if name not in self._layouts:
            return value.contiguous()
        mesh, placements = self._layouts[name]
        return distribute_tensor(
            value.contiguous().to(mesh.device_type),
            mesh,
            placements,
            src_data_rank=None,
        )


def _conv(value: Tensor) -> Tensor:
    """Return a linear layer's matrix in Conv1D's layout, or the reverse. A bias stays
    unchanged.
    """
    if value.ndim != 2:
        return value
    return value.t().contiguous()


class _Reader(HuggingFaceStorageReader):
    """Reads a folder whose weights may have other names than the canonical ones."""

    def __init__(self, path: str, canonical: Callable[[str], str]) -> None:
        super().__init__(path)
        self._canonical = canonical

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        self._in_file = {self._canonical(name): name for name in stored}
        metadata.state_dict_metadata = {
            self._canonical(name): weight for name, weight in stored.items()
        }
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = []
        for item in plan.items:
            index = dataclasses.replace(
                item.storage_index, fqn=self._in_file[item.storage_index.fqn]
            )
            items.append(dataclasses.replace(item, storage_index=index))
        return super().read_data(dataclasses.replace(plan, items=items), planner)

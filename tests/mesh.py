"""Run one training step of the real trainer on a given mesh, and save its full
gradients for comparison.
"""

import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torchtitan.distributed import ParallelDims

from tests import ring_attention
from tests.oracle import EVERY_ESTIMATOR
from titan_disp import cpu, objective
from titan_disp.config.load import load_config
from titan_disp.dispersion.autograd import process_group
from titan_disp.models.decoder import canonical_name
from titan_disp.models.registry import MODELS, model_args

GLOBAL_BATCH = 8
SEQ_LEN = 32
VOCAB = 2048


def of_loss(variant, estimator):
    drawn = " --dispersion.max_tokens 10" if estimator == "sampled" else ""
    # Above which pairs are at first
    margin = " --dispersion.options margin=1.5" if variant == "simctg" else ""
    return f"--dispersion.variant {variant} --dispersion.estimator {estimator}{drawn}{margin}"


# What the words of a case's name mean, as in "final_norm-fsdp-full-always".
WORDS = {
    **dict.fromkeys(("reference", "alone", "fsdp", "fsdp4", "batch2"), ""),
    "hsdp": "--parallelism.data_parallel_replicate_degree 2",
    "tp": "--parallelism.tensor_parallel_degree 2",
    "cp": "--parallelism.context_parallel_degree 2",  # by tests/ring_attention.py
    "compile": "--compile.enable",
    "op": "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op",
    "full": "--activation_checkpoint.mode full",
    "batch8": "--training.local_batch_size 8",
    # on two replicas of two shards: two microbatches
    "batch1": "--training.local_batch_size 1",
    "logits": "--parallelism.disable_loss_parallel",
    # of 64 tokens, or of half of them: the last chunk is smaller
    "chunked": "--training.head_chunk_tokens 24",
    "always": "--parallelism.fsdp_reshard_after_forward always",
    "final_norm": "--dispersion.final_norm",
    "single": "--model.overrides n_layers=1",
    "untied": "--model.overrides n_layers=2,enable_weight_tying=false",
    "single_untied": "--model.overrides n_layers=1,enable_weight_tying=false",
    "gpt2": "--model.name gpt2_disp",
    "llama": "--model.name llama_disp",
    "gpt2_untied": "--model.name gpt2_disp --model.flavor nano_untied",
    # Another place of a token in the batch, or another position, would be another
    # gradient.
    "noise": "--baseline.method noisy_embedding --baseline.with_dispersion --baseline.noise_alpha 100",
    "mask": "--stream.document_mask",
    "restart": "--stream.document_mask --stream.restart_positions",
    "within": "--dispersion.within_documents",
    "without": "--dispersion.no-enabled",
    **{
        f"{variant}_{estimator}": of_loss(variant, estimator)
        for variant, estimator in EVERY_ESTIMATOR
    },
}


def options_of(case):
    """The options of a case, on two layers if it says nothing else."""
    words = [option for word in case.split("-") for option in WORDS[word].split()]
    return (
        words
        if "--model.overrides" in words
        else [*words, "--model.overrides", "n_layers=2"]
    )


def global_batch():
    """Input and label token ids, each [8, 32].

    The sequences have different numbers of valid labels.
    """
    tokens = torch.randint(
        VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(7)
    )
    labels = tokens[:, 1:].clone()
    labels[0, :20] = -100
    labels[5, 3] = -100
    return tokens[:, :-1], labels


def documents():
    """The number of each token's document in its sequence, [8, 32].

    The first sequence is one document.
    """
    begins = (
        torch.rand(GLOBAL_BATCH, SEQ_LEN, generator=torch.Generator().manual_seed(3))
        < 0.15
    )
    begins[0] = False
    begins[1, :2] = True
    return begins.cumsum(1).int() - begins[:, :1].int()


def dims(world_size, **degrees):
    every = dict.fromkeys(
        ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1
    )
    return ParallelDims(**every | degrees, world_size=world_size)


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def canonical(model):
    return {canonical_name(name): p for name, p in model.named_parameters()}


def weights(trainer):
    return {
        name: full(p.detach()).clone()
        for name, p in canonical(trainer.model_parts[0]).items()
    }


def assert_tied(model, tied=True):
    assert (model.output.weight is model.tok_embeddings.weight) == tied, (
        "two parameters became one, or one two"
    )
    assert ("output.weight" in canonical(model)) == (not tied)


def assert_one_group(model):
    """Tied embeddings are one group of FSDP with the final norm; others are gathered
    and reduced by themselves.
    """
    tied = model.model_args.enable_weight_tying
    head = (model.norm, model.output)
    groups = [m._get_fsdp_state()._modules for m in (model.tok_embeddings, *head)]
    one = (*model.embeddings, *head) if tied else head
    assert groups == [one if tied else tuple(model.embeddings), one, one]


def plain_model(before, overrides, name="qwen3_disp", activations=()):
    """The forward without any hook, in one process, with the weights that a run began
    with.
    """
    args = model_args(name, "nano", overrides)
    args.activations = activations
    args.max_seq_len = SEQ_LEN
    model = MODELS[name].model_cls(args)
    model.init_weights()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return model


def errors(gradients, reference):
    assert gradients.keys() == reference.keys()
    # A bias of the keys adds the same to all scores of a query: its gradient is 0 but
    # for rounding; the scale is the queries'.
    scale = {n: reference[n.replace("wk.bias", "wq.bias")].norm() for n in reference}
    return {
        n: ((gradients[n] - g).norm() / scale[n]).item() for n, g in reference.items()
    }


def plain_model_of(case, before):
    """The same of a case, with the activations of all layers."""
    words = options_of(case)
    overrides = words[words.index("--model.overrides") + 1]
    name = (
        words[words.index("--model.name") + 1]
        if "--model.name" in words
        else "qwen3_disp"
    )
    return plain_model(
        before,
        overrides,
        name,
        activations=range(1, int(overrides[len("n_layers=")]) + 1),
    )


def job_config(sample, run_folder, *options):
    return load_config(
        [
            *("--model.name", "qwen3_disp", "--model.flavor", "nano"),
            *(
                "--model.hf_assets_path",
                f"{sample}/tokenizer",
                "--job.dump_folder",
                str(run_folder),
            ),
            *("--training.dataset", "c4", "--training.dataset_path", str(sample)),
            *("--training.seq_len", str(SEQ_LEN), "--training.local_batch_size", "2"),
            *(
                "--training.global_batch_size",
                str(GLOBAL_BATCH),
                "--training.mixed_precision_param",
                "float32",
            ),
            *(
                "--training.max_norm",
                "1e9",
                "--training.steps",
                "100",
                "--debug.seed",
                "11",
            ),
            *(
                "--dispersion.enabled",
                "--dispersion.coeff",
                "1.0",
                "--optimizer.implementation",
                "foreach",
            ),
            *("--optimizer.weight_decay", "0.0"),
            *(
                "--activation_checkpoint.mode",
                "none",
                "--lr_scheduler.warmup_steps",
                "0",
                "--checkpoint.interval",
                "1",
            ),
            *options,
        ]
    )


def build(sample, run_folder, *options):
    from titan_disp.train import DispTrainer

    return DispTrainer(job_config(sample, run_folder, *options))


def trained(sample, run_folder, *options):
    trainer = build(sample, run_folder, *options)
    trainer.train()
    trainer.close()


def step(trainer):
    """Train one step on the fixed batch.

    Returns the gradients that the optimizer saw.
    """
    dims = trainer.parallel_dims
    job = trainer.job_config
    gradients = {}
    dp_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    masked = job.stream.document_mask or job.dispersion.within_documents
    size = job.training.local_batch_size
    of_ranks = (
        x.chunk(dims.dp_replicate * dims.dp_shard)
        for x in (*global_batch(), documents())
    )
    batches = zip(*(own[dp_rank].split(size) for own in of_ranks), strict=True)

    def keep(optimizer, args, kwargs):
        with _disable_current_modes():  # these collectives are not part of the step
            gradients.update(
                {
                    name: full(p.grad).clone()
                    for name, p in canonical(trainer.model_parts[0]).items()
                }
            )

    hook = trainer.optimizers.optimizers[0].register_step_pre_hook(keep)
    trainer.step += 1
    trainer.ntokens_seen += GLOBAL_BATCH * SEQ_LEN
    trainer.metrics_processor.ntokens_since_last_log += 1
    trainer.metrics_processor.data_loading_times.append(0.0)
    trainer.train_step(
        ({"input": i, **({"segments": s} if masked else {})}, label)
        for i, label, s in batches
    )
    hook.remove()
    return gradients


class Collectives(TorchDispatchMode):
    """Records a step's collectives as (kind, the group's ranks, bytes of the whole
    tensor, not of a shard).
    """

    KINDS = ("all_gather", "reduce_scatter", "all_reduce")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        kind = next(
            (k for k in self.KINDS if k.replace("_", "") in name.replace("_", "")), None
        )
        if "c10d" in namespace and kind is not None:
            if namespace == "c10d":
                group = next(
                    dist.ProcessGroup.unbox(a)
                    for a in args
                    if isinstance(a, torch.ScriptObject)
                )
            else:
                group = _resolve_process_group(args[-1])
            ranks = dist.get_process_group_ranks(group)
            size = max(
                sum(t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor))
                for a in args
            )
            whole = (
                size * len(ranks)
                if kind == "all_gather" and namespace != "c10d"
                else size
            )
            self.calls.append((kind, tuple(ranks), whole))
        return func(*args, **(kwargs or {}))


def run_cases(sample, folder, cases, checkpoint):
    """For every case, build a trainer, train a step, and save gradients and weights to
    ``folder/name.pt`` on rank 0.

    But for the reference, layers count as large, so that the gradients of the loss are
    computed in the backward pass.
    """
    # Users would see this warning of a view among the model's outputs.
    warnings.filterwarnings(
        "error", message=r"FSDP2-wrapped module \(FSDP\w+DispModel\)"
    )
    # and of modules that a plan of TP names and the model lacks
    warnings.filterwarnings("error", message="Parallelize plan key")
    if cpu.active() and any(
        "--parallelism.context_parallel_degree" in options for options in cases.values()
    ):
        ring_attention.install()
    for name, options in cases.items():
        options = [*options, *(("--checkpoint.enable",) if checkpoint else ())]
        trainer = build(sample, Path(folder) / f"run_{name}", *options)
        model = trainer.model_parts[0]
        tied = "untied" not in name
        assert_tied(model, tied)
        if trainer.parallel_dims.fsdp_enabled:
            assert_one_group(model)
        before = weights(trainer)
        # a dispatch mode cannot see the calls of compiled code
        compiled = "--compile.enable" in options
        alone = (
            (lambda zs: [[z] for z in zs])
            if "reference" not in name
            else objective.packed
        )
        large = mock.patch.object(objective, "packed", alone)
        in_backward = mock.patch.object(
            objective, "compute_in_backward", wraps=objective.compute_in_backward
        )
        with (
            large,
            in_backward as called,
            nullcontext() if compiled else Collectives() as collectives,
        ):
            gradients = step(trainer)
        sharded = process_group(trainer.loss_fn.group) is not None
        direct = (
            sharded
            or "reference" in name
            or "--dispersion.no-enabled" in options
            or "sampled" in options
        )
        assert called.called != direct
        assert_tied(model, tied)
        after = weights(trainer)
        if checkpoint:
            trainer.checkpointer.save(trainer.step)
            step(trainer)  # changes the weights, so that loading has something to undo
            trainer.checkpointer.load()
            assert_tied(model, tied)
            for n, weight in weights(trainer).items():
                assert torch.equal(weight, after[n]), (
                    f"{n} changed through save and load"
                )
        trainer.close()
        if dist.get_rank() == 0:
            calls = None if compiled else collectives.calls
            found = {
                "gradients": gradients,
                "before": before,
                "after": after,
                "collectives": calls,
            }
            torch.save(found, Path(folder) / f"{name}.pt")
        dist.barrier()


def parts_of(row):
    """The documents of one sequence as slices, by its segments."""
    cuts = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
    return [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def alone(model, tokens, segments, restart):
    """What a model without masks returns for every document by itself, put together
    again: logits, activations.
    """
    rows = []
    places = torch.arange(tokens.shape[1], device=tokens.device)[None]
    for row, ids in zip(tokens, segments, strict=True):
        parts = parts_of(ids.tolist())
        found = [
            model(row[None, part], positions=None if restart else places[:, part])
            for part in parts
        ]
        rows.append(
            [
                torch.cat(pieces, 1)
                for pieces in zip(*((x, *z) for x, z, _ in found), strict=True)
            ]
        )
    logits, *activations = (torch.cat(same) for same in zip(*rows, strict=True))
    return logits, tuple(activations)

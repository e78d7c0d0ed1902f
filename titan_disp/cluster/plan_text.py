"""This module prints a plan for people."""

from titan_disp.cluster.hardware import GPUS
from titan_disp.cluster.plan import MAX_NODES, Plan
from titan_disp.wording import counted

_SHOWN = 24  # most node counts on the line


def _duration(days: float) -> str:
    if days >= 2:
        return f"{days:.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 2 else f"{days * 1440:.0f} minutes"


def _seconds(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _size(count: float) -> str:
    """Format a number of bytes, with 1 GB = 1e9 bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _node_counts(plan: Plan) -> str:
    counts = plan.node_counts
    degrees = {c.replicate for c in counts}
    if all(c.replicate == c.nodes for c in counts):
        degree = "= nodes"
    else:
        degree = f"= {degrees.pop()}" if len(degrees) == 1 else "in brackets"
    shown = [f"{c.nodes} ({c.replicate})" if degree == "in brackets" else str(c.nodes) for c in counts]
    if len(shown) > _SHOWN:
        shown[_SHOWN - 1 : -1] = ["…"]
    return f"{', '.join(shown)}; data_parallel_replicate_degree {degree} (tried up to {MAX_NODES})"


def render(plan: Plan) -> str:
    """Render the plan as about 35 lines of text. Warnings come last."""
    m, gpu = plan.memory, GPUS[plan.gpu]
    world = plan.nodes * plan.gpus_per_node
    share = plan.dispersion_flops_per_step / plan.flops_per_step
    rows = [
        ("plan", plan.config),
        ("machine", f"{counted(plan.nodes, 'node')} × {plan.gpus_per_node} {plan.gpu} = {counted(world, 'GPU')}"),
        (
            "mesh",
            f"replicate {plan.replicate} × shard {plan.shard} × context {plan.context_parallel} × "
            f"tensor {plan.tensor_parallel}; {counted(plan.data_parallel, 'data-parallel rank')}",
        ),
        (
            "batch",
            f"{counted(plan.global_batch_size, 'sequence')} of {plan.seq_len:,} tokens = {plan.local_batch_size} × "
            f"{counted(plan.data_parallel, 'rank')} × {counted(plan.accumulation_steps, 'accumulation step')}",
        ),
        (
            "steps",
            f"{plan.steps:,} of {plan.tokens_per_step:,} tokens = {plan.total_tokens:,} tokens",
        ),
        *(("sources" if i == 0 else "", str(share)) for i, share in enumerate(plan.sources)),
        ("parameters", f"{plan.parameters:,}; {plan.parameters_non_embedding:,} without embedding and output"),
        (
            "memory",
            f"{_size(plan.memory_total)} of {plan.gpu_memory / 1e9:.0f} GB per GPU, estimated (1 GB = 1e9 bytes)",
        ),
        ("  weights", _size(m.weights)),
        ("  gradients", _size(m.gradients)),
        ("  optimizer", _size(m.optimizer)),
        ("  unsharded", f"{_size(m.unsharded)} of gathered weights and their gradients"),
        ("  activations", _size(m.activations)),
        ("  dispersion", f"{_size(m.dispersion)} of saved gradients"),
        ("  logits", _size(m.logits)),
        ("checkpoint", _size(plan.checkpoint_bytes)),
        (
            "  over the run",
            f"{plan.checkpoints} saved, {plan.checkpoints_kept} kept; at most {_size(plan.checkpoint_disk_bytes)} on disk",
        ),
        (
            "  every",
            f"{_seconds(plan.checkpoint_interval_seconds)}; written in {_seconds(plan.checkpoint_seconds)} at "
            f"{plan.storage_bandwidth / 1e9:g} GB/s (--storage-bandwidth)"
            if plan.checkpoints
            else "never",
        ),
        (
            "FLOPs",
            f"{plan.flops_per_step:.3e} per step, {plan.total_flops:.3e} in total; dispersion adds "
            f"{plan.dispersion_flops_per_step:.3e} and {plan.total_dispersion_flops:.3e} ({share:.1%})",
        ),
        (
            "step",
            f"{_seconds(plan.step_seconds)}: {_seconds(plan.computing_seconds)} of computing at {plan.mfu:.0%} of the bf16 "
            f"peak, {gpu.bf16_flops / 1e12:g} TFLOP/s per GPU, plus communication",
        ),
        (
            "  within nodes",
            f"{_size(plan.within_bytes)} sent per GPU, {_seconds(plan.within_seconds)} at "
            f"{plan.node_bandwidth / 1e9:g} GB/s (--node-bandwidth)",
        ),
        (
            "  between",
            f"{_size(plan.between_bytes)}, {_seconds(plan.between_seconds)} at {plan.network_bandwidth / 1e9:g} GB/s "
            "(--network-bandwidth)",
        ),
        ("  not hidden", f"{_seconds(plan.exposed_seconds)}, {plan.exposed_seconds / plan.step_seconds:.1%} of a step"),
        ("throughput", f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"),
        ("time", f"{_duration(plan.days)} for all steps"),
    ]
    if share:
        rows += [
            ("  without", f"{_duration(plan.days_without_dispersion)} with dispersion off"),
            (
                "  fp32",
                f"{_duration(plan.days_fp32_dispersion)} if dispersion computes in fp32 (fp32 activations or l2_repel)",
            ),
        ]
    rows.append(("node counts", _node_counts(plan)))
    lines = [f"{name:<15} {text}" for name, text in rows]
    return "\n".join(lines + [f"warning: {warning}" for warning in plan.warnings])

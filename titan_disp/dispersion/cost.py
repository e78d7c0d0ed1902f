"""The cost of the dispersion loss, computed from shapes alone."""

from typing import NamedTuple

from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.dispersion.variants.base import AutogradVariant


class Cost(NamedTuple):
    """The cost of a loss for one layer of one sequence. Small terms are left out."""

    flops: float  # of matrix products, forward and backward, summed over all ranks
    gathered: float  # elements of an all-gather, in the dtype of the tokens
    reduced: float  # elements of an all-reduce, in float32
    # Bytes that a GPU reads and writes outside of matrix products, for bf16 tokens.
    # benchmarks/gpu_cost.py counted them with TITAN_DISP_TRITON=0. (The Triton kernel is not
    # measured yet.)
    bytes: float


def cost_of(
    loss: DispersionLoss,
    tokens: int,
    features: int,
    shards: int,
    segmented: bool = False,
) -> Cost:
    """Return the cost of the loss for one layer of one sequence.

    Args:
        tokens: per sequence.
        features: per token.
        shards: ranks over which the sequence is sharded.
        segmented: whether only pairs within documents count. The cost still includes
            all pairs, although tiles without such a pair are skipped.

    The operations of an ``AutogradVariant`` are unknown. Its cost is taken as that of a
    function of pairs.
    """
    variant = loss._variant
    is_sampled = loss.estimator == "sampled" and loss.max_tokens < tokens
    positions = tokens
    if is_sampled:
        positions = loss.max_tokens
    by_moments = variant.linear_in_tokens
    if variant.of_pairs and (segmented or features >= positions):
        by_moments = False  # M would mix segments, or cost more than all pairs
    if loss.estimator == "moments":
        by_moments = True
    # Here, every rank computes the whole loss.
    repeated = is_sampled or isinstance(variant, AutogradVariant)

    if by_moments:
        # M, and its product with the tokens, take 2NF² each.
        flops = 4.0 * positions * features**2
    elif repeated or shards == 1:
        # The cosines take 2N²F, and V another 2N²F. Each tile above the diagonal also
        # serves for its transpose, which saves half of the cosines.
        flops = 3.0 * positions**2 * features
    else:
        # A rank can save cosines only among its own tokens. This saving is ignored.
        flops = 4.0 * positions**2 * features
    if repeated:
        flops *= shards

    if is_sampled:
        return Cost(
            flops=flops,
            gathered=0.0,
            reduced=positions * features,
            # The first term is for the sampled tokens. The second is for reading and
            # writing the gradient from the rest of the model.
            bytes=(40.0 * positions * shards + 4.0 * tokens) * features,
        )
    if by_moments:
        return Cost(
            flops=flops,
            gathered=0.0,
            reduced=features**2 + features,
            bytes=52.0 * tokens * features,
        )
    return Cost(
        flops=flops,
        gathered=tokens * features,
        reduced=0.0,
        # A cosine is read in float32 and written in bf16. A sequence of two blocks has
        # 3/4 N² cosines, and a sequence of more blocks has fewer.
        bytes=tokens * (12.0 * features + 3.75 * tokens),
    )

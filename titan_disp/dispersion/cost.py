"""What the dispersion loss costs, counted from shapes alone."""

from typing import NamedTuple

from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.dispersion.variants.base import AutogradVariant


class Cost(NamedTuple):
    """What a loss costs for one layer of one sequence, up to small terms."""

    flops: float  # of products, on all ranks together, forward and backward
    gathered: float  # elements of an all-gather, in the dtype of the tokens
    reduced: float  # elements of an all-reduce, in float32
    # that a GPU reads and writes beside products, for tokens in bf16, as counted by
    # benchmarks/gpu_cost.py --no-kernel: Triton's kernel of pairs was not measured yet
    bytes: float


def cost_of(
    loss: DispersionLoss,
    tokens: int,
    features: int,
    shards: int,
    segmented: bool = False,
) -> Cost:
    """Return what the loss costs for one layer of a sequence over this number of shards
    (ranks).

    If it is ``segmented``, all pairs count, although those of tiles without a common
    segment are left out. Autograd code counts as a function of pairs, as what it does
    is not known.
    """
    variant = loss._variant
    is_sampled = loss.estimator == "sampled" and loss.max_tokens < tokens
    positions = tokens
    if is_sampled:
        positions = loss.max_tokens
    by_moments = variant.linear_in_tokens
    if variant.of_pairs and (segmented or features >= positions):
        by_moments = False  # M would not tell segments apart, or would cost more
    if loss.estimator == "moments":
        by_moments = True
    # Every rank computes the whole loss of the tokens that it gathers.
    repeated = is_sampled or isinstance(variant, AutogradVariant)

    if by_moments:
        # M, and its product with the tokens, take 2NF² each.
        flops = 4.0 * positions * features**2
    elif repeated or shards == 1:
        # The cosines take 2N²F, and V another 2N²F. Each tile above the diagonal serves
        # both sides, which saves half of the cosines.
        flops = 3.0 * positions**2 * features
    else:
        # Of shards, only a rank's own tokens save some of them; this is ignored.
        flops = 4.0 * positions**2 * features
    if repeated:
        flops *= shards

    if is_sampled:
        return Cost(
            flops=flops,
            gathered=0.0,
            reduced=positions * features,
            # The sampled tokens, and the gradient that arrives, read and written
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
        # A cosine is read in float32 and written in bf16. Of a whole sequence, there
        # are 3/4 N² if it has two blocks, and fewer if it has more.
        bytes=tokens * (12.0 * features + 3.75 * tokens),
    )

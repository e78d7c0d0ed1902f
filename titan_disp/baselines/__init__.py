"""These baselines are said to counteract condensation too: noisy embeddings and active forgetting."""

# The options of [baseline] that only one method uses.
OPTIONS = {
    "noise_alpha": "noisy_embedding",
    "forget_every": "active_forgetting",
    "forget_lr": "active_forgetting",
    "forget_warmup": "active_forgetting",
}

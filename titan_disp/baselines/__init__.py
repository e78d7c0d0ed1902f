"""What else is said to counteract condensation, to compare dispersion with: noisy embeddings and active forgetting."""

# The options of [baseline] that one method has for itself.
OPTIONS = {
    "noise_alpha": "noisy_embedding",
    "forget_every": "active_forgetting",
    "forget_lr": "active_forgetting",
    "forget_warmup": "active_forgetting",
}

"""Where C4 is, and whether it is there."""

from pathlib import Path

from torchtitan.hf_datasets.text_datasets import DATASETS

from titan_disp.errors import ConfigError


def check_data(dataset: str, dataset_path: str | None, key: str = "training") -> None:
    """Raise ConfigError where a local dataset cannot be read; a dataset on the hub is only checked by name.

    Args:
        dataset: a name that TorchTitan knows: c4, c4_validation, c4_test, or one registered by the user.
        dataset_path: a folder laid out as allenai/c4 on the hub (``en/c4-train.*.json.gz``), or None for the hub.
        key: the config section, for the message.
    """
    if dataset not in DATASETS:
        raise ConfigError(f"{key}.dataset is {dataset!r}, expected one of {', '.join(DATASETS)}")
    if dataset_path is None or not dataset.startswith("c4") or dataset == "c4_test":
        return
    split = "validation" if dataset == "c4_validation" else "train"
    pattern = f"en/c4-{split}.*.json.gz"
    folder = Path(dataset_path)
    if not folder.is_dir():
        raise ConfigError(
            f"{key}.dataset_path is {dataset_path!r}, which is not a folder; expected one that holds {pattern}. "
            "For a sample corpus: titan-disp sample-data DIR"
        )
    if not any(folder.glob(pattern)):
        raise ConfigError(f"{key}.dataset_path {dataset_path!r} holds no {pattern}")

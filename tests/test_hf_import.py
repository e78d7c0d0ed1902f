"""These tests begin training with the weights of a Hugging Face folder (checkpoint.initial_load_in_hf)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.command_line import DEMO, ROOT, rank_environment, train
from titan_disp.config.checks import check_inputs
from titan_disp.config.load import load_config
from titan_disp.config.options import ExportOptions
from titan_disp.data.files import check_data, list_files
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export, hf_weights
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.models.hf import check_hf_folder
from titan_disp.models.qwen3 import Qwen3HfAdapter, flavors

NANO = Qwen3HfAdapter(flavors["nano"], None)
WIKITEXT = ROOT / "examples" / "wikitext.py"
TOKENS = torch.arange(96).view(2, 48) * 19 % 2048


@pytest.fixture(scope="module")
def published(tmp_path_factory, hf_tokenizer):
    """Save a model of nano's shape with transformers: float32 weights, RoPE under rope_parameters, and no lm_head."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**NANO.architecture(), max_position_embeddings=4096, initializer_range=0.2)
    folder = tmp_path_factory.mktemp("published")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(hf_tokenizer / name, folder)
    return folder


@pytest.fixture
def folder(published, tmp_path):
    """Copy the folder for a test that damages it."""
    return shutil.copytree(published, tmp_path / "folder")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def as_on_the_hub(folder):
    """Qwen's folders have several bfloat16 files, a copy of the embedding as lm_head, and rope_theta in config.json."""
    weights = {name: w.bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
    return weights


def test_folders_that_fit(published, folder):
    check_hf_folder(published, NANO)
    as_on_the_hub(folder)
    check_hf_folder(folder, NANO)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 28}, "num_hidden_layers is 28 in config.json and 6 in this model.*Change these keys"),
        (
            {"vocab_size": 151936, "hidden_size": 1024},
            "vocab_size is 151936 in config.json and 2048 in this model; hidden_size is 1024",
        ),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4 in config.json and 2"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "rope_theta is 10000.0 in config.json and 1000000",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000}}, "rope_scaling is {'rope_type': 'yarn'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False in config.json and True"),
        ({"model_type": "llama"}, "model_type is 'llama' in config.json and 'qwen3'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 in config.json and 1e-06"),
        ({"attention_bias": True}, "attention_bias is True in config.json and False"),
    ],
)
def test_another_network(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        check_hf_folder(folder, NANO)


def test_damaged_folders(folder):
    def check(message):
        with pytest.raises(ConfigError, match=message):
            check_hf_folder(folder, NANO)

    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    check(r"model\.norm\.weight of shape \(32,\), expected \(64,\)")
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, folder / "model.safetensors")
    check(r"lacks 1 of the 68 weights, 'model\.norm\.weight' first: is the download complete\?")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    check(r"model\.safetensors is damaged: .*Download it again")
    (folder / "config.json").write_text("{")
    check("config.json is not valid JSON")
    (folder / "config.json").unlink()
    check("config.json: No such file")
    (folder / "model.safetensors").unlink()
    check(r"holds no \*\.safetensors; expected a folder with")
    shutil.rmtree(folder)
    check("is not a folder; expected a folder with")


def job(sample, published, run, *options):
    paths = (
        "--training.dataset_path",
        str(sample),
        "--job.dump_folder",
        str(run),
        "--model.hf_assets_path",
        str(published),
    )
    return load_config(["--job.config_file", str(DEMO), *paths, *options])


def test_checked_before_training(sample, published, tmp_path):
    in_hf, path = "--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path"
    check_inputs(job(sample, published, tmp_path / "run", in_hf))
    with pytest.raises(ConfigError, match=r"checkpoint\.initial_load_in_hf: '.*nowhere' is not a folder"):
        check_inputs(job(sample, published, tmp_path / "run", in_hf, path, str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="needs checkpoint.initial_load_model_only"):
        check_inputs(job(sample, published, tmp_path / "run", in_hf, "--checkpoint.no-initial_load_model_only"))
    with pytest.raises(
        ConfigError, match=r"checkpoint\.initial_load_path '.*nowhere' cannot be loaded: it is not a folder"
    ):
        check_inputs(job(sample, published, tmp_path / "run", path, str(tmp_path / "nowhere")))
    with pytest.raises(
        ConfigError, match=r"no \.metadata.*or a Hugging Face folder with checkpoint\.initial_load_in_hf"
    ):
        check_inputs(job(sample, published, tmp_path / "run", path, str(published)))
    for option in ((in_hf,), (path, str(published))):
        with pytest.raises(
            ConfigError, match=r"is set, but checkpoint\.enable is false, so that nothing would be loaded"
        ):
            check_inputs(job(sample, published, tmp_path / "run", *option, "--checkpoint.no-enable"))
    # A run with a checkpoint resumes from it, even if the folder is gone.
    (tmp_path / "run/checkpoint/step-5").mkdir(parents=True)
    (tmp_path / "run/checkpoint/step-5/.metadata").touch()
    check_inputs(job(sample, published, tmp_path / "run", in_hf, path, str(tmp_path / "nowhere")))


ONE_STEP = (
    *("--training.steps", "1", "--training.seq_len", "48", "--optimizer.lr", "0", "--lr_scheduler.warmup_steps", "0"),
    *("--checkpoint.initial_load_in_hf", "--condensation.interval", "0", "--metrics.log_freq", "1"),
)


@pytest.mark.slow
@pytest.mark.night
def test_import_and_export_are_inverse(sample, published, tmp_path):
    """After a step with learning rate 0 in the real trainer in float32, the weights are equal bit for bit."""
    run = tmp_path / "run"
    options = (*ONE_STEP, "--model.hf_assets_path", str(published))
    train(DEMO, sample, run, *options)
    export(ExportOptions(run, tmp_path / "out"))
    before, after = (load_file(f / "model.safetensors") for f in (published, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(published)
    with torch.no_grad():
        torch.testing.assert_close(load_model(find_saved(run))(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=0)
    assert "started from | the weights of `published0`" in (tmp_path / "out/README.md").read_text()

    # The same command continues the run although the option is still set, and says so.
    again = train(DEMO, sample, run, *options, "--training.steps", "2")
    assert "initial_load_in_hf is True but the checkpoint.folder exists" in again.stdout
    assert find_saved(run).step == 2


@pytest.mark.slow
@pytest.mark.night
def test_import_on_two_ranks_from_a_folder_of_the_hub(sample, folder, tmp_path):
    """Tensor-parallel ranks load bfloat16 files with a copy of the embedding, despite a partial save in the way."""
    weights = as_on_the_hub(folder)
    run = tmp_path / "run"
    (run / "checkpoint/step-1").mkdir(parents=True)
    (run / "checkpoint/step-1/__0_0.distcp").write_bytes(b"half")
    options = (*ONE_STEP, "--model.hf_assets_path", str(folder), "--parallelism.tensor_parallel_degree", "2")
    train(DEMO, sample, run, *options, nproc=2)
    imported = hf_weights(find_saved(run))
    assert imported.keys() == weights.keys() - {"lm_head.weight"}
    for name, weight in imported.items():
        assert torch.equal(weight, weights[name].float()), name


@pytest.mark.slow
@pytest.mark.night
def test_another_models_weights_stop_every_start(sample, folder, tmp_path):
    """The run starts under torchrun, without the checks of titan-disp train."""
    edit_config(folder, num_hidden_layers=7)
    options = ["--training.dataset_path", str(sample), "--model.hf_assets_path", str(folder), *ONE_STEP]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "titan_disp.train",
            "--job.config_file",
            str(DEMO),
            "--job.dump_folder",
            str(tmp_path),
            *options,
        ],
        cwd=ROOT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2
    assert "num_hidden_layers is 7 in config.json and 6 in this model" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_wikitext_as_articles(tmp_path):
    """Rows are single lines as on the hub, many of them empty, and an article spans two files. The data set is "text".

    The text of the original archive, which has lines of white space for empty rows, gives the same documents.
    """
    import pyarrow
    import pyarrow.parquet

    raw, out = tmp_path / "raw", tmp_path / "wikitext"
    raw.mkdir()
    first = [
        "",
        " = One = \n",
        "",
        " a = b \n",
        " = = Section = = \n",
        " body \n",
        "",
        " = Two : A tale = \n",
        " text \n",
    ]
    rows = {"train-00000-of-00002": first, "train-00001-of-00002": [" more \n", " = Three = \n", " end \n"]}
    rows["validation-00000-of-00001"] = first
    for name, texts in rows.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), raw / f"{name}.parquet")
    subprocess.run([sys.executable, str(WIKITEXT), str(raw), str(out)], check=True, capture_output=True)
    files = list_files("text", str(out))
    assert len(files) == 64
    texts = [json.loads(line)["text"] for file in files for line in Path(file.url).read_text().splitlines()]
    assert texts == [
        " = One = \n a = b \n = = Section = = \n body \n", " = Two : A tale = \n text \n more \n", " = Three = \n end \n",
    ]  # fmt: skip
    assert [file.name for file in list_files("text_validation", str(out))] == ["validation-00.jsonl"]
    archive, same = tmp_path / "archive", tmp_path / "same"
    archive.mkdir()
    for name, split in {"wiki.train.raw": "train", "wiki.valid.raw": "validation"}.items():
        lines = [row or " \n" for file, texts in rows.items() if file.startswith(split) for row in texts]
        (archive / name).write_text("".join(lines))
    subprocess.run([sys.executable, str(WIKITEXT), str(archive), str(same)], check=True, capture_output=True)
    written = [{path.name: path.read_text() for path in folder.iterdir()} for folder in (out, same)]
    assert written[0] == written[1]
    done = subprocess.run([sys.executable, str(WIKITEXT), str(same), str(same / "x")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "neither train-*.parquet nor wiki.train.*" in done.stderr
    with pytest.raises(ConfigError, match="training.dataset is 'text': set training.dataset_path"):
        check_data("text", None)

"""Training begins with the weights of a Hugging Face folder
(checkpoint.initial_load_in_hf), and ends with such a folder.
"""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import titan_disp.plugin  # noqa: F401
from tests.command_line import ROOT
from tests.distributed import spawn
from tests.mesh import SEQ_LEN, assert_tied, build, job_config, step
from tests.streams import parquet
from titan_disp.checks import check_inputs
from titan_disp.config.command_options import ExportOptions
from titan_disp.data.listing import list_files
from titan_disp.data.tokenizer import encoder, load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export
from titan_disp.lab.export.saved import load_model
from titan_disp.models.hf import check_hf_folder
from titan_disp.models.registry import MODELS, model_args

TOKENS = torch.arange(3 * SEQ_LEN).view(3, SEQ_LEN) * 19 % 2048


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def adapter_of(name, overrides=""):
    return MODELS[name].adapter(model_args(name, "nano", overrides), None)


@pytest.fixture(scope="module")
def published(tmp_path_factory, hf_tokenizer):
    """By model, a folder of nano's shape as transformers saves it; the EOS is named in
    config.json alone, as GPT-2's is.
    """
    folders = {}
    for name in MODELS:
        torch.manual_seed(0)
        adapter = adapter_of(name)
        config = transformers.AutoConfig.for_model(
            **adapter.architecture(), **adapter.extras(), initializer_range=0.2
        )
        config.eos_token_id = config.bos_token_id = load_tokenizer(hf_tokenizer).eos_id
        folders[name] = tmp_path_factory.mktemp(name)
        getattr(transformers, adapter.transformers_class)(config).save_pretrained(
            folders[name]
        )
        shutil.copy(hf_tokenizer / "tokenizer.json", folders[name])
        (folders[name] / "tokenizer_config.json").write_text(
            '{"model_max_length": 1024}'
        )
    return folders


def edit_config(folder, remove=(), **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    kept = {
        key: value
        for key, value in config.items()
        if value is not None and key not in remove
    }
    file.write_text(json.dumps(kept))


def as_on_the_hub(name, folder):
    """Qwen's folders have several bfloat16 files, a copy of the embedding as lm_head,
    and rope_theta in config.json.

    SmolLM2's lack head_dim, too.

    openai-community/gpt2 has no prefix, the causal mask beside the weights, and no
    n_inner in config.json.
    """
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if name == "gpt2_disp":
        weights = {name.removeprefix("transformer."): w for name, w in weights.items()}
        weights |= {
            f"h.{i}.attn.bias": torch.ones(1024, 1024).tril().bool()[None, None]
            for i in range(6)
        }
        save_file(weights, folder / "model.safetensors")
        edit_config(
            folder, remove=("n_inner", "tie_word_embeddings", "scale_attn_weights")
        )
        return folder
    weights = {name: w.bfloat16() for name, w in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    files = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors"
        for i, name in enumerate(sorted(weights))
    }
    for file in set(files.values()):
        save_file(
            {name: w for name, w in weights.items() if files[name] == file},
            folder / file,
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": files})
    )
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"][
        "rope_theta"
    ]
    remove = ["rope_parameters"]
    if name == "llama_disp":
        remove += ["head_dim", "attention_bias", "mlp_bias"]
    edit_config(folder, remove, rope_theta=theta)
    return folder


@pytest.fixture(scope="module")
def hub(published, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    return {
        name: as_on_the_hub(name, shutil.copytree(published[name], folder / name))
        for name in MODELS
    }


@pytest.mark.parametrize("name", MODELS)
def test_folders_that_fit(published, hub, name):
    for folder in (published[name], hub[name]):
        check_hf_folder(folder, adapter_of(name))
        assert (
            encoder(load_tokenizer(folder))("A text.")[-1]
            == load_tokenizer(folder).eos_id
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 9, "hidden_size": 8},
            "is 9 in config.json and 2048 in this model; hidden_size is 8 .*Change .*: add vocab_size=9,dim=8 to model.overrides",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_theta is 10000.0 .* add rope_theta=10000.0 to model.overrides",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_scaling is {'rope_type': 'yarn'",
        ),
        (
            {"tie_word_embeddings": False},
            "tie_word_embeddings is False .* add enable_weight_tying=false to model.overrides",
        ),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 in config.json and 1e-06"),
        ({"attention_bias": True}, "attention_bias is True in config.json and False"),
        ({"n_positions": 512}, "describe: n_positions is 512 in config.json"),
        ({"n_head": None}, "describe: n_head is None in config.json .* weights$"),
        ({"n_inner": 200}, "describe: n_inner is 200 in config.json"),
        (
            {"activation_function": "relu"},
            "describe: activation_function is 'relu' in config.json",
        ),
    ],
)
def test_another_network(published, tmp_path, changes, message):
    name = "gpt2_disp" if message.startswith("describe") else "qwen3_disp"
    folder = shutil.copytree(published[name], tmp_path / "folder")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        check_hf_folder(folder, adapter_of(name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, "mlp_bias is True in config.json and False"),
        ({"num_key_value_heads": None}, "num_key_value_heads is 4 in config.json"),
        ({"hidden_size": 32, "head_dim": None}, "hidden_size is 32 .*head_dim is 8 in"),
        (
            {"rope_parameters": None},
            "rope_theta is 10000.0 in config.json and 100000 in this model. Change",
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}},
            "describe: rope_scaling is {'rope_type': 'llama3', .* and None in this",
        ),
        (
            {
                "rope_parameters": None,
                "rope_theta": 1e5,
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "describe: rope_scaling is {'type': 'linear', .* and None in this model",
        ),
    ],
)
def test_another_llama(published, tmp_path, changes, message):
    folder = shutil.copytree(published["llama_disp"], tmp_path / "folder")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        check_hf_folder(folder, adapter_of("llama_disp"))


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}},  # transformers 5
        # meta-llama's own files
        {"rope_parameters": None, "rope_theta": 1e5, "rope_scaling": LLAMA3},
    ],
)
def test_scaled_rotary_embeddings(published, tmp_path, spelling):
    folder = shutil.copytree(published["llama_disp"], tmp_path / "folder")
    edit_config(folder, **spelling)
    check_hf_folder(folder, adapter_of("llama_disp", "rope_factor=8"))
    with pytest.raises(ConfigError, match="'factor': 8.0, .* 'factor': 4.0}"):
        check_hf_folder(folder, adapter_of("llama_disp", "rope_factor=4"))


@pytest.mark.parametrize("name", MODELS)
def test_an_output_layer_that_is_not_the_embedding_of_a_tied_config(
    hub, tmp_path, name
):
    """It would be dropped; transformers 5 keeps it. A copy of the embedding may be
    there.
    """
    folder = shutil.copytree(hub[name], tmp_path / "folder")
    tied = adapter_of(name)
    untied = adapter_of(name, "enable_weight_tying=false")
    embedding = "wte.weight" if name == "gpt2_disp" else "model.embed_tokens.weight"
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    save_file(
        {"lm_head.weight": weights[embedding].clone()}, folder / "z-head.safetensors"
    )
    check_hf_folder(folder, tied)
    with pytest.raises(ConfigError, match="tie_word_embeddings is True in config.json"):
        check_hf_folder(folder, untied)
    weights[embedding][-1, -1] += 1
    save_file({"lm_head.weight": weights[embedding]}, folder / "z-head.safetensors")
    with pytest.raises(
        ConfigError,
        match="lm_head.weight differs .* add enable_weight_tying=false to model.overrid",
    ) as raised:
        check_hf_folder(folder, tied)
    assert "\n" not in str(raised.value)
    check_hf_folder(folder, untied)


def test_damaged_folders(published, tmp_path):
    folder = shutil.copytree(published["qwen3_disp"], tmp_path / "folder")
    file = folder / "model.safetensors"
    config = folder / "config.json"
    norm = "model.norm.weight"
    weights = load_file(file)
    whole = file.read_bytes()
    without = {k: v for k, v in weights.items() if k != norm}
    for damage, message in (
        (
            lambda: save_file(without | {norm: torch.ones(32)}, file),
            r"of shape \(32,\), expected \(64,\)",
        ),
        (
            lambda: save_file(without, file),
            r"lacks 1 of the 68 weights, such as 'model\.norm\.weight': is the download",
        ),
        (
            lambda: file.write_bytes(whole[: len(whole) // 2]),
            r"model\.safetensors is damaged \(download it again\): ",
        ),
        (lambda: config.write_text("{"), "config.json is not valid JSON"),
        (config.unlink, "config.json: No such file"),
        (file.unlink, r"holds no \*\.safetensors; expected a folder with"),
    ):
        damage()
        with pytest.raises(ConfigError, match=message):
            check_hf_folder(folder, adapter_of("qwen3_disp"))


def test_checked_before_training(sample, published, tmp_path):
    """A run with a checkpoint resumes from it, even if the folder is gone."""
    in_hf = (
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        "--checkpoint.initial_load_path",
    )
    places = (published["qwen3_disp"], tmp_path / "nowhere")
    fits, missing = (
        job_config(sample, tmp_path / "run", *in_hf, str(folder)) for folder in places
    )
    check_inputs(fits)
    with pytest.raises(
        ConfigError,
        match=r"checkpoint\.initial_load_in_hf: '.*nowhere' is not a folder",
    ):
        check_inputs(missing)
    (tmp_path / "run/checkpoint/step-5").mkdir(parents=True)
    (tmp_path / "run/checkpoint/step-5/.metadata").touch()
    check_inputs(missing)


def step_from_weights(sample, folders, dest):
    """The real trainer on FSDP2 × TP: Hugging Face's weights in, a step at learning
    rate 0, a checkpoint and such weights out.
    """
    for name, folder in folders.items():
        options = (
            *(
                "--model.name",
                name,
                "--model.hf_assets_path",
                str(folder),
                "--optimizer.lr",
                "0",
            ),
            *(
                "--parallelism.tensor_parallel_degree",
                "2",
                "--checkpoint.enable",
                "--checkpoint.initial_load_in_hf",
            ),
            *("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"),
        )
        trainer = build(sample, dest / name, *options)
        trainer.checkpointer.load()
        assert_tied(trainer.model_parts[0])
        step(trainer)
        if dist.get_rank() == 0:
            trainer.run_folder.record_start()
        trainer.checkpointer.save(1)
        trainer.checkpointer.save(2, last_step=True)
        trainer.close()


@pytest.fixture(scope="module")
def stepped(sample, hub, tmp_path_factory):
    dest = tmp_path_factory.mktemp("stepped")
    spawn(4, step_from_weights, sample, hub, dest)
    return dest


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_are_inverse_on_a_mesh(published, stepped, tmp_path, name):
    """Bit for bit, from a folder of the hub, through FSDP2 × TP 2×2 and a step at
    learning rate 0.
    """
    before = load_file(published[name] / "model.safetensors")
    saved = {}
    several = name != "gpt2_disp"
    if several:
        before = {name: w.bfloat16().float() for name, w in before.items()}
    files = list((stepped / name / "checkpoint/step-2").glob("*.safetensors"))
    assert len(files) == (2 if several else 1)  # as in the folder
    for file in files:
        saved |= load_file(file)
    assert before.keys() == saved.keys()
    assert all(torch.equal(saved[name], w) for name, w in before.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(files[0].parent).eval()
    for target in ("1", "2"):  # shards of four ranks, and safetensors
        ours = load_model(
            export(ExportOptions(stepped / name / target, tmp_path / target))
        )
        exported = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / target
        ).eval()
        for logits in (ours(TOKENS), exported(TOKENS).logits):
            torch.testing.assert_close(logits, theirs(TOKENS).logits, atol=1e-4, rtol=0)


def test_wikitext_as_articles(tmp_path, monkeypatch):
    """Rows are single lines as on the hub, many of them empty, and an article spans two
    files. The data set is "text".

    The text of the original archive, which has lines of white space for empty rows,
    gives the same documents.
    """

    def write(*folders):
        monkeypatch.setattr(sys, "argv", ["wikitext.py", *map(str, folders)])
        runpy.run_path(str(ROOT / "examples" / "wikitext.py"), run_name="__main__")

    raw, out, archive, same = (
        tmp_path / name for name in ("raw", "wikitext", "archive", "same")
    )
    one = ["", " = One = \n", "", " a = b \n", " = = Section = = \n", " body \n", ""]
    two = [" = Two : A tale = \n", " text \n"]
    more = [" more \n"]
    three = [" = Three = \n", " end \n"]
    raw.mkdir()
    archive.mkdir()
    for name, rows in {
        "train-00": one + two,
        "train-01": more + three,
        "validation-00": one + two,
    }.items():
        (raw / f"{name}.parquet").write_bytes(parquet(text=rows))
    for name, rows in {"train": one + two + more + three, "valid": one + two}.items():
        (archive / f"wiki.{name}.raw").write_text("".join(row or " \n" for row in rows))
    write(raw, out)
    write(archive, same)
    files = list_files("text", str(out))
    assert len(files) == 64
    found = [
        json.loads(line)["text"]
        for file in files
        for line in Path(file.url).read_text().splitlines()
    ]
    assert found == ["".join(article) for article in (one, two + more, three)]
    assert [file.name for file in list_files("text_validation", str(out))] == [
        "validation-00.jsonl"
    ]
    written = [
        {path.name: path.read_text() for path in folder.iterdir()}
        for folder in (out, same)
    ]
    assert written[0] == written[1]
    with pytest.raises(
        SystemExit, match=r"neither train-\*\.parquet nor wiki\.train\.\*"
    ):
        write(same, same / "x")

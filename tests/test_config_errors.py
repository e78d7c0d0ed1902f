"""Every mistake of a user gives one message that says what was found and what to
change, before any rank starts.
"""

import importlib.util
import json
import re

import pytest

from tests.command_line import DEMO, ROOT, typed
from tests.pages import can_start, changed, loaded
from titan_disp import train
from titan_disp.checks import (
    check_config,
    check_device,
    check_inputs,
)
from titan_disp.cluster.launch import launch
from titan_disp.config.command_options import TrainOptions
from titan_disp.config.load import load_config
from titan_disp.errors import EXIT_CODE, ConfigError

TP = "parallelism.tensor_parallel_degree"
CP = "parallelism.context_parallel_degree"
SHARDS = "parallelism.data_parallel_shard_degree"
REPLICAS = "parallelism.data_parallel_replicate_degree"
VALIDATION = "validation.enable true validation.steps 1"
SHIPPED = [
    *sorted((ROOT / "train_configs").glob("*.toml")),
    ROOT / "examples" / "own_text.toml",
]
NOISE = "baseline.method noisy_embedding"
FORGET = "baseline.method active_forgetting dispersion.enabled false"


@pytest.fixture
def options(sample):
    return (
        "--model.hf_assets_path",
        f"{sample}/tokenizer",
        "--training.dataset_path",
        str(sample),
    )


def value(word):
    try:
        return json.loads(word)
    except ValueError:
        return word


def check(config, ranks):
    check_config(config, ranks)
    check_device(config)
    check_inputs(config)


# The number of ranks, the keys that are changed with their values in JSON, and the
# message.
@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (
            1,
            "dispersion.variant simctg dispersion.options margin=3",
            "^dispersion.options.margin is 3.0, expected",
        ),
        (
            1,
            "dispersion.warmup_steps 1000",
            "dispersion.warmup_steps is 1000, expected 0 to 300",
        ),
        (
            1,
            "dispersion.layers [0,6]",
            r"dispersion.layers is \[0, 6\], but the model has 6 blocks",
        ),
        (
            1,
            "dispersion.layers [3] model.overrides n_layers=2",
            r"\[3\], but the model has 2 blocks",
        ),
        (
            1,
            "dispersion.final_norm true dispersion.layers early_half",
            r"'early_half' leaves the last block \(5\) out",
        ),
        (
            1,
            "budget.tokens 1000",
            "steps is 300, but budget.tokens 1,000 at 4,096 tokens per step makes 1 step:",
        ),
        (1, "training.steps -1", "neither budget.tokens nor training.steps"),
        (1, "optimizer.early_step_in_backward true", "early_step_in_backward"),
        (
            1,
            "checkpoint.keep_latest_k 1",
            "keep_latest_k is 1, expected 2 or more checkpoints or 0: 0 keeps all",
        ),
        (1, "checkpoint.interval 0", "checkpoint.interval is 0"),
        (
            1,
            "checkpoint.enable true checkpoint.interval 20 checkpoint.keep_every 50",
            r"keep_every is 50, expected a multiple of checkpoint.interval \(20\)",
        ),
        (
            1,
            "checkpoint.create_seed_checkpoint true checkpoint.load_only true",
            "create_seed_checkpoint is true, but checkpoint.load_only is true: it saves .* Set checkpoint.load_only = false$",
        ),
        (
            1,
            "checkpoint.last_save_in_hf true",
            "last_save_in_hf is true, but checkpoint.last_save_model_only is false: safetensors",
        ),
        (
            1,
            "activation_checkpoint.mode selective activation_checkpoint.selective_ac_option x",
            "option is 'x', expected \"op\" or a whole number",
        ),
        (1, "model.hf_assets_path /nowhere", "'/nowhere', which is not a folder"),
        (
            1,
            "model.name gpt2",
            r"model.name is 'gpt2', expected .qwen3_disp.* \(did you mean gpt2_disp\?\)",
        ),
        (
            1,
            "model.name gpt2_disp model.flavor 124M training.seq_len 1025",
            "positions for 1024 tokens: set",
        ),
        (
            1,
            "model.flavor 9B",
            "'9B', expected one of nano, .*0.6B, 0.6B_untied, 1.7B, 4B, 8B, 14B, 32B",
        ),
        (
            1,
            "model.overrides vocab_size=100",
            "2048 tokens, .*'nano with vocab_size = 100' has a vocabulary of 100",
        ),
        (
            1,
            f"{VALIDATION} validation.seq_len 0",
            "validation.seq_len is 0, expected 1 or more tokens or -1",
        ),
        (1, "training.local_batch_size 0", "local_batch_size is 0"),
        (1, "training.seq_len 1", "seq_len is 1, expected a number ≥ 2"),
        (2, f"{CP} 2 training.seq_len 130", "seq_len 130 is not divisible by 4"),
        (2, f"{CP} 2", "context_parallel_degree is 2, expected 1 on a CPU"),
        (
            2,
            f"{CP} 2 stream.document_mask true",
            "context parallelism of Qwen3. Set parallelism.context_parallel_degree = 1$",
        ),
        (2, f"{CP} 0", "context_parallel_degree is 0, expected 1 or more ranks"),
        (
            2,
            "parallelism.pipeline_parallel_degree 2",
            "pipeline_parallel_degree is 2, expected 1",
        ),
        (2, "parallelism.expert_parallel_degree 2", "expert_parallel_degree"),
        (
            1,
            "stream.restart_positions true",
            "restart_positions is true, but stream.document_mask is false: attention",
        ),
        (
            2,
            "parallelism.enable_async_tensor_parallel true",
            "but compile.enable is false: the compiler .* Set compile.enable = true$",
        ),
        (2, f"{REPLICAS} 2", "pure data parallelism .* is refused"),
        (
            2,
            f"{REPLICAS} -1",
            "replicate_degree is -1, but data_parallel_shard_degree is -1: only one of them",
        ),
        (
            3,
            f"{REPLICAS} -1 {SHARDS} 8 {TP} 2",
            "2 = 2, but the number of ranks is 3: set .*, or use another number of ranks$",
        ),
        (
            2,
            f"{SHARDS} 4",
            "= 4, but the number of ranks is 2: set data_parallel_replicate_degree = -1",
        ),
        (
            3,
            f"{TP} 3",
            "tensor_parallel_degree 3 does not divide the 4 attention heads",
        ),
        (
            2,
            f"{TP} 2 model.overrides hidden_dim=15",
            "2 does not divide the 15 hidden units .* 'nano with hidden_dim",
        ),
        (
            2,
            "training.enable_cpu_offload true",
            "enable_cpu_offload is true, but there is no accelerator",
        ),
        (
            1,
            "profiling.enable_memory_snapshot true",
            "enable_memory_snapshot is true, but there is no accelerator",
        ),
        (
            2,
            f"{TP} 2 compile.enable true activation_checkpoint.mode full",
            "expected at most two of them on a CPU",
        ),
        (
            2,
            f"training.enable_cpu_offload true {TP} 2",
            "only FSDP offloads, .* data_parallel_shard_degree 1",
        ),
        (
            1,
            "dispersion.variant decorrelation dispersion.tau 0.5",
            "^dispersion.tau is 0.5, but variant",
        ),
        (
            1,
            NOISE,
            "'noisy_embedding' and dispersion.enabled is true.*baseline.with_dispersion = true",
        ),
        (
            1,
            "baseline.with_dispersion true",
            "with_dispersion is true, but baseline.method is 'none'",
        ),
        (
            1,
            f"{NOISE} dispersion.enabled false baseline.with_dispersion true",
            "dispersion.enabled is false: leave with_dispersion out",
        ),
        (
            1,
            "baseline.noise_alpha 5.0",
            "noise_alpha is 5.0, but baseline.method 'none' does not use it",
        ),
        (
            1,
            f"{NOISE} baseline.forget_every 9",
            "forget_every is 9, but .*set the method to 'active_forgetting'",
        ),
        (
            1,
            f"{FORGET} baseline.forget_every 300",
            "forget_every is 300, expected .*fewer than the 300 steps of the run",
        ),
        (1, "comm.mode local_tensor", "local_tensor"),
        (1, "fault_tolerance.enable true", "fault_tolerance"),
        (
            1,
            "metrics.enable_wandb true",
            r"wandb is not installed: pip install wandb",
        ),
        (
            1,
            'stream.text_field ""',
            "text_field is '', expected the name of a field: most",
        ),
        (
            1,
            f"{VALIDATION} validation.seq_len 257",
            "is 257, expected 1 to training.seq_len 256, .* Leave it out",
        ),
        (
            2,
            f"{VALIDATION} validation.seq_len 33 {TP} 2",
            "validation.seq_len is 33, expected a multiple of",
        ),
        (
            1,
            f"{VALIDATION} validation.dataset_path /nowhere",
            "validation.dataset_path is '/nowhere'",
        ),
        (
            1,
            f"{VALIDATION} validation.local_batch_size 0",
            "validation.local_batch_size is 0, expected 1 or more sequences",
        ),
        (
            1,
            f"{VALIDATION} validation.freq 0",
            "validation.freq is 0, expected 1 or more steps",
        ),
        (1, "metrics.log_freq 0", "metrics.log_freq is 0, expected 1 or more steps"),
        (1, "training.gc_freq 0", "training.gc_freq is 0, expected 1 or more steps"),
    ],
)
def test_refused(options, ranks, changes, message, monkeypatch):
    installed = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "wandb" else installed(name, *a),
    )
    words = changes.split()
    config = changed(
        loaded(DEMO, *options),
        dict(zip(words[::2], map(value, words[1::2]), strict=True)),
    )
    with pytest.raises(ConfigError, match=message):
        check(config, ranks)


def test_a_refused_run_leaves_nothing_behind(options, tmp_path, monkeypatch):
    monkeypatch.setattr("titan_disp.cluster.launch.elastic_launch", None)
    for change in (
        "--stream.slots=1",
        "--training.enable_cpu_offload",
        f"--model.hf_assets_path={tmp_path}",
    ):
        words = (*options, "--job.dump_folder", str(tmp_path / "run"), change)
        with pytest.raises(ConfigError):
            launch(TrainOptions(str(DEMO), words, 2))
    assert not (tmp_path / "run").exists()


def test_validation_sequences_are_as_long_as_the_trainings_unless_they_are_said_to_be_shorter():
    keys = {"validation.enable": True, "validation.steps": 1, "training.seq_len": 64}
    for said, expected in (({}, 64), ({"validation.seq_len": 20}, 20)):
        config = changed(loaded(DEMO), keys | said)
        check_config(config, 1)
        assert config.validation.seq_len == expected


def test_toml(tmp_path):
    for layers in ("early_half", [0, 3]):
        (tmp_path / f"{layers}.toml").write_text(f"[dispersion]\nlayers = {layers!r}")
        assert loaded(tmp_path / f"{layers}.toml").dispersion.layers == layers
        assert loaded(
            tmp_path / f"{layers}.toml", "--dispersion.layers", "1", "2"
        ).dispersion.layers == [1, 2]
    for toml, message in (
        (
            "[dispersion]\nlambda = 1.0",
            r"unknown key .*dispersion.lambda \(did you mean dispersion.coeff\?\)",
        ),
        ("[trainig]\nsteps = 1", r"trainig \(did you mean training\?\)"),
        ("[training]\nstep = 1", r"training.step \(did you mean training.steps\?\)"),
        ("training = 3", r"^training is 3, expected \[training\], a section$"),
        ("[dispersion]\ncoeff = 'much'", r"dispersion.coeff is 'much'"),
        (
            "[training]\nsteps = 'many'",
            r"training.steps is 'many', expected 1 or more steps or -1$",
        ),
        (
            "[training]\nsteps = '10'",
            r"is '10', expected 1 or more steps or -1 \(write 10\)$",
        ),
        (
            "[training]\nsteps = true",
            r"training.steps is true, expected 1 or more steps or -1$",
        ),
        ("[dispersion]\ncoeff = true", r"dispersion.coeff is true, expected a number"),
        ("[dispersion]\nlayers = 'middle'", r"dispersion.layers is 'middle'"),
        ("[debug]\nseed = true", r"debug.seed is true, expected a number ≥ -9"),
        (
            "[training]\nmixed_precision_param = 'fp8'",
            r"is 'fp8', expected \"bfloat16\" or \"float32\"$",
        ),
        (
            "[[optimizer]]\nlr = 1.0",
            r"optimizer is a list of tables, expected .* single",
        ),
        (
            "[budget]\ntokens = 1.5e9",
            r"expected 0 or more tokens \(write 1500000000\)$",
        ),
        ("[training]\nsteps = 3\nsteps = 4", "a key or a section is defined twice$"),
        ("[training]\ndataset = c4", "Invalid value .*: a text needs straight quotes"),
        ("[stream]\ndocument_mask = 'yes'", r"expected true or false \(write true\)$"),
        (
            "[compile]\ncomponents = 'model'",
            r"expected a list of strings \(write \['model'\]\)$",
        ),
        (
            "[dispersion]\nlayers = 3",
            r"is 3, expected a list of .* \(write \[3\]\)$",
        ),
        (
            "[dispersion]\nlayers = [1.5]",
            r"is \[1.5\], expected a list of whole numbers, \"all",
        ),
        ("[dispersion]\nlayers = [1, 1.5]", r"is \[1, 1.5\], expected a list of whole"),
        (
            "[job]\ndescription = 3",
            r"expected a string \(write '3'\)$",
        ),
        (
            "[activation_checkpoint]\nselective_ac_option = 2",
            r"\(write '2'\)$",
        ),
        (
            "[training]\nmax_norm = 'none'",
            r"is 'none', expected a number > 0 or inf: .* no clipping, write inf$",
        ),
        ("[model]\noverrides = 3", r"^model.overrides is 3, expected a table$"),
        ("[dispersion]\nlosses = 3", r"^dispersion.losses is 3, expected tables$"),
        (
            "[checkpoint]\nenable_checkpoint = true",
            r"checkpoint.enable_checkpoint \(did you mean checkpoint.enable\?\)$",
        ),
        ("[training]\nzzz = 1", r"training.zzz \(see titan-disp config\)$"),
        ("[zzz]\na = 1", r"zzz \(see titan-disp config\)$"),
        ("lr = 1", r"unknown key lr \(did you mean optimizer.lr\?\)$"),
        (
            "[stream]\nsources = []",
            r"^stream.sources is empty: write \[\[stream.sources\]\], or leave it out$",
        ),
        ("[dispersion", r"not valid TOML"),
        ("# \udcff", r"not valid TOML"),
        (
            "[dispersion]\nenabled = True",
            r"not valid TOML: .*at line 2.*: write true in lower case$",
        ),
        ("[dispersion]\nenabled = False # off", r"write false in lower case$"),
        (
            "[training]\ndataset = Trueish",
            r"Invalid value \(at line 2, column 11\): a text needs",
        ),
        ("[dispersion]\nlayers = [True", r"write true in lower case$"),
    ):
        (tmp_path / "c.toml").write_text(toml, errors="surrogateescape")
        with pytest.raises(ConfigError, match=message):
            loaded(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("--dispersion.enabled false", "--dispersion.no-enabled"),
        ("--dispersion.enabled=True", "--dispersion.enabled"),
        ("--dispersion.no-enabled true", "--dispersion.no-enabled"),
        ("--dispersion.no-enabled false", "--dispersion.enabled"),
        ("--compile.enable 1", "--compile.enable"),
        ("--dispersion.layers=[1,2]", "--dispersion.layers 1 2"),
        ("--dispersion.layers 1,2", "--dispersion.layers 1 2"),
        ("--dispersion.layers [1, 2]", "--dispersion.layers 1 2"),  # two words
        ('--dispersion.layers ["last"]', "--dispersion.layers last"),
        # was ["model" and "loss"]
        ('--compile.components ["model","loss"]', "--compile.components model,loss"),
        ("--compile.components model loss", "--compile.components model,loss"),
    ],
)
def test_options_written_as_in_toml(written, right):
    section, key = re.match(r"--(\w+)\.(?:no-)?(\w+)", right).groups()
    expected = {
        "enabled": "no-" not in right,
        "enable": True,
        "components": ["model", "loss"],
    }
    expected |= {"layers": "last" if right.endswith("last") else [1, 2]}
    for spelling in (written, right):
        config = loaded(DEMO, *spelling.split(" "), "--training.steps", "3")
        assert getattr(getattr(config, section), key) == expected[key]
        assert config.training.steps == 3


def test_an_entry_of_a_table_is_added_to_those_of_the_file(tmp_path):
    (tmp_path / "c.toml").write_text(
        f"{DEMO.read_text()}\n[model.overrides]\nn_layers = 2\nn_heads = 2\n"
    )
    entries = (
        "--model.overrides.hidden_dim=16",
        "--model.overrides.n_layers",
        "3",
        "--dispersion.options.t=2",
    )
    config = loaded(tmp_path / "c.toml", *entries)
    assert config.model.overrides == {"n_layers": 3, "n_heads": 2, "hidden_dim": 16}
    assert config.dispersion.options == {"t": 2}
    config = loaded(tmp_path / "c.toml", "--model.overrides", "dim=32", *entries[:1])
    # the word replaces the table
    assert config.model.overrides == {"dim": 32, "hidden_dim": 16}


def test_a_module_adds_keys_to_those_of_titan_disp(tmp_path, monkeypatch):
    (tmp_path / "more_keys.py").write_text(
        "from dataclasses import dataclass, field\n\n\n"
        "@dataclass\nclass Extra:\n    depth: int = 3\n\n\n"
        "@dataclass\nclass JobConfig:\n    extra: Extra = field(default_factory=Extra)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.toml").write_text(
        DEMO.read_text().replace("titan_disp.job_config", "more_keys")
        + "\n[extra]\ndepth = 4\n"
    )
    config = loaded(tmp_path / "c.toml", "--dispersion.tau", "2")
    assert (config.extra.depth, config.dispersion.tau) == (4, 2.0)
    config = loaded(tmp_path / "c.toml", "--extra.depth=5")
    assert config.extra.depth == 5
    with pytest.raises(ConfigError, match="extra.depth is 'x', expected <class 'int'>"):
        loaded(tmp_path / "c.toml", "--extra.depth=x")


def test_torchtitan_says_nothing_of_the_tokenizers_folder(sample, caplog):
    """Our message about it says more."""
    with pytest.raises(
        ConfigError,
        match=r"unknown option --dispersion.lambda \(did you mean --dispersion.coeff\?\)",
    ):
        load_config(["--job.config_file", str(DEMO), "--dispersion.lambda", "0.5"])
    load_config(["--job.config_file", str(DEMO), "--model.hf_assets_path", "nowhere"])
    config = load_config(
        ["--job.config_file", str(DEMO), "--model.tokenizer_path", "nowhere"]
    )
    assert config.model.hf_assets_path == "nowhere"
    assert not caplog.records


def test_missing_config(tmp_path):
    (tmp_path / "demo_cpu.toml").touch()
    (tmp_path / "zz").mkdir()
    for name, message in (
        # only a folder is near
        (
            tmp_path / "zzz",
            "cannot read the config '.*zzz': No such file or directory$",
        ),
        (
            tmp_path / "demo_cpu.tml",
            r"No such file or directory \(did you mean /.*/demo_cpu\.toml\?\)$",
        ),
        (tmp_path, "Is a directory$"),
    ):
        with pytest.raises(ConfigError, match=message):
            loaded(name)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_valid(config):
    ranks = {
        "qwen3_0.6b_c4.toml": 640,
        "gpt2_124m_c4.toml": 8,
        "smollm2_135m_c4.toml": 8,
    }
    can_start(ranks.get(config.name, 1), config)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_started_by_torchrun_print_one_message_and_no_traceback(
    monkeypatch, capfd, rank
):
    """Without the launcher, rank 0 says it, and the others exit with the same status in
    silence.
    """
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as exit:
        train.main(["--job.config_file", str(DEMO), "--dispersion.tau", "0"])
    said = capfd.readouterr().err
    assert exit.value.code == EXIT_CODE
    assert (
        ("titan-disp: error: dispersion.tau is 0.0" in said)
        == ("titan-disp: error" in said)
        == (rank == 0)
    )
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "option", ["-training.steps", "—training.steps", "–dispersion.coeff=1"]
)
def test_other_dashes(monkeypatch, capsys, option):
    words = (option, "3") if "=" not in option else (option,)
    with pytest.raises(ConfigError, match=f"write --{option[1:]}$"):
        load_config(["--job.config_file", str(DEMO), *words])
    assert typed(monkeypatch, "plan", DEMO, *words) == 2
    assert f"write --{option[1:]}" in capsys.readouterr().err


def test_whole_numbers_and_a_mark_of_windows(tmp_path):
    """TorchTitan's optimizers refuse the integer 0."""
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[optimizer]\nbeta2 = 0\nlr = 1\n")
    config = load_config(["--job.config_file", str(file)])
    assert (config.optimizer.beta2, type(config.optimizer.beta2)) == (0.0, float)


def test_a_run_folder_that_is_a_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "run"
    file.touch()
    words = ("plan", DEMO, "--gpus-per-node", "1", "--job.dump_folder", file)
    assert typed(monkeypatch, *words, "--strict") == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_level_of_debugging_that_torchtitan_cannot_stand(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    with pytest.raises(
        ConfigError, match="TORCH_DISTRIBUTED_DEBUG is DETAIL, expected"
    ):
        check_device(loaded(DEMO))

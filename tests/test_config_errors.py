"""Every mistake of a user gives one message that says what was found and what to change, before any rank starts."""

import importlib.util
import math
import re
import subprocess
import sys

import pytest
from torchtitan.tools.logging import logger as torchtitan_logger

from tests.command_line import DEMO, ROOT, command, environment, rank_environment
from titan_disp.cluster.launch import launch
from titan_disp.config.checks import check_config, check_ranges
from titan_disp.config.keys import Facts, facts_of, key
from titan_disp.config.load import load_config
from titan_disp.config.options import TrainOptions
from titan_disp.errors import ConfigError
from titan_disp.job_config import all_keys

CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


NOISE = ("--baseline.method", "noisy_embedding")
FORGET = ("--baseline.method", "active_forgetting", "--dispersion.no-enabled")
REPLICAS = "--parallelism.data_parallel_replicate_degree"


def set_key(config, name, value):
    section, key = name.split(".")
    setattr(getattr(config, section), key, value)


def options(sample):
    return ["--model.hf_assets_path", f"{sample}/tokenizer", "--training.dataset_path", str(sample)]


@pytest.mark.parametrize(
    ("nproc", "change", "message"),
    [
        (1, ["--dispersion.variant", "l2_repel", "--dispersion.estimator", "moments"], r"'l2_repel' does not support"),
        (
            1,
            ["--dispersion.variant", "decorrelation", "--dispersion.tau", "0.5"],
            r"^dispersion.tau is 0.5, but variant",
        ),
        (1, ["--dispersion.warmup_steps", "1000"], r"dispersion.warmup_steps is 1000, expected 0 to 300"),
        (
            1,
            ["--budget.tokens", "1_000"],
            r"training.steps is 300, but budget.tokens 1,000 at 4,096 tokens per step makes 1 step:",
        ),
        (1, ["--training.steps", "-1"], r"neither budget.tokens nor training.steps"),
        (1, ["--budget.stop_at_tokens", "5000000"], r"stop_at_tokens is 5,000,000, more than the 1,228,800 tokens"),
        (1, ["--optimizer.early_step_in_backward"], r"early_step_in_backward"),
        (1, ["--checkpoint.keep_latest_k", "1"], r"keep_latest_k is 1"),
        (1, ["--dispersion.layers", "0", "6"], r"dispersion.layers is \[0, 6\], but the model has 6 blocks"),
        (1, ["--dispersion.layers", "2", "2"], r"dispersion.layers is \[2, 2\].*none of them twice"),
        (
            1,
            ["--dispersion.final_norm", "--dispersion.layers", "early_half"],
            r"dispersion.final_norm is true, but dispersion.layers 'early_half' leaves the last block \(5\) out",
        ),
        (1, ["--model.hf_assets_path", "/nowhere"], r"'/nowhere', which is not a folder"),
        (1, ["--training.dataset_path", "/nowhere"], r"training.dataset_path is '/nowhere', which does not exist"),
        (1, ["--training.dataset", "pile"], r"training.dataset is 'pile', expected c4 or"),
        (
            1,
            ["--training.global_batch_size", "6"],
            r"global_batch_size 6 is not a positive multiple of local_batch_size 4 × 1",
        ),
        (2, ["--training.global_batch_size", "12"], r"12 is not a positive multiple of local_batch_size 4 × 2"),
        (1, ["--training.local_batch_size", "0"], r"local_batch_size is 0"),
        (
            2,
            ["--training.seq_len", "129", "--parallelism.tensor_parallel_degree", "2"],
            r"seq_len 129 is not divisible by 2",
        ),
        (1, ["--training.seq_len", "1"], r"seq_len is 1, expected at least 2"),
        (1, ["--training.steps", "0"], r"training.steps is 0"),
        (2, ["--parallelism.context_parallel_degree", "2"], r"context_parallel_degree is 2, expected 1 on a CPU"),
        (2, ["--parallelism.pipeline_parallel_degree", "2"], r"pipeline_parallel_degree is 2, expected 1"),
        (2, ["--parallelism.data_parallel_replicate_degree", "2"], r"pure data parallelism .* is refused"),
        (
            2,
            ["--parallelism.data_parallel_shard_degree", "4"],
            r"= 4, but the number of ranks is 2: set data_parallel_replicate_degree = -1",
        ),
        (2, [REPLICAS, "-1"], r"replicate_degree is -1, but data_parallel_shard_degree is -1: only one of them"),
        (
            2,
            [REPLICAS, "-2"],
            r"replicate_degree is -2, expected at least 1, or -1 to compute it from the number of ranks",
        ),
        (2, [REPLICAS, "-1", "--parallelism.data_parallel_shard_degree", "1"], r"pure data parallelism .* is refused"),
        (
            12,
            [REPLICAS, "-1", "--parallelism.data_parallel_shard_degree", "8"],
            r"needs a multiple of data_parallel_shard_degree 8 × .* = 8 ranks, but there are 12: .* a divisor of 12$",
        ),
        (
            3,
            [
                REPLICAS,
                "-1",
                "--parallelism.data_parallel_shard_degree",
                "8",
                "--parallelism.tensor_parallel_degree",
                "2",
            ],
            r"degree 1 × tensor_parallel_degree 2 = 2 does not divide the number of ranks, 3: set tensor_parallel_.* that does",
        ),
        (1, ["--parallelism.tensor_parallel_degree", "2"], r"2 = 2 does not divide the number of ranks, 1:"),
        (
            3,
            ["--parallelism.tensor_parallel_degree", "3"],
            r"tensor_parallel_degree 3 does not divide the 4 attention heads",
        ),
        (4, ["--parallelism.tensor_parallel_degree", "4"], r"4 does not divide the 2 key/value heads"),
        (2, ["--parallelism.expert_parallel_degree", "2"], r"expert_parallel_degree"),
        (2, ["--training.enable_cpu_offload"], r"enable_cpu_offload is true, but there is no accelerator"),
        (
            2,
            ["--training.enable_cpu_offload", "--parallelism.tensor_parallel_degree", "2"],
            r"enable_cpu_offload is true, but only FSDP offloads, .* data_parallel_shard_degree 1",
        ),
        (
            1,
            ["--model.flavor", "9B"],
            r"model.flavor is '9B', expected one of nano, .*0.6B, 0.6B_untied, 1.7B, 4B, 8B, 14B, 32B",
        ),
        (
            1,
            ["--model.overrides", "hiden_dim=16"],
            r"model.overrides.hiden_dim is not known \(did you mean hidden_dim\?\)",
        ),
        (
            1,
            ["--model.overrides", "vocab_size=100"],
            r"2048 tokens, but model.flavor 'nano with vocab_size = 100' has a vocabulary of 100",
        ),
        (1, ["--model.overrides", "n_layers=2", "--dispersion.layers", "3"], r"\[3\], but the model has 2 blocks"),
        (
            2,
            ["--model.overrides", "hidden_dim=15", "--parallelism.tensor_parallel_degree", "2"],
            r"tensor_parallel_degree 2 does not divide the 15 hidden units .* of 'nano with hidden_dim = 15'",
        ),
        (
            1,
            [*NOISE],
            r"baseline.method is 'noisy_embedding' and dispersion.enabled is true.*baseline.with_dispersion = true",
        ),
        (1, ["--baseline.with_dispersion"], r"with_dispersion is true, but baseline.method is 'none'"),
        (
            1,
            [*NOISE, "--dispersion.no-enabled", "--baseline.with_dispersion"],
            r"dispersion.enabled is false: leave it",
        ),
        (1, ["--baseline.noise_alpha", "5"], r"noise_alpha is 5.0, but baseline.method 'none' does not use it"),
        (
            1,
            [*NOISE, "--baseline.forget_every", "9"],
            r"forget_every is 9, but .*set the method to 'active_forgetting'",
        ),
        (
            1,
            [*FORGET, "--baseline.forget_every", "300"],
            r"forget_every is 300, expected .*fewer than the 300 of the run",
        ),
        (1, ["--dispersion.coeff", "-0.1"], r"dispersion.coeff is -0.1, expected a number ≥ 0"),
        (1, ["--model.name", "llama3"], r"model.name is 'llama3', expected \"qwen3_disp\""),
        (1, ["--model.name", "gpt2"], r"model.name is 'gpt2', .* \(did you mean gpt2_disp\?\)"),
        (1, ["--model.flavor", "0.6b"], r"model.flavor is '0.6b', .* \(did you mean 0.6B\?\)"),
        (1, ["--dispersion.variant", "angula"], r"dispersion.variant is 'angula', .* \(did you mean angular\?\)"),
        (1, ["--comm.mode", "local_tensor"], r"local_tensor"),
        (1, ["--fault_tolerance.enable"], r"fault_tolerance"),
        (1, ["--metrics.enable_wandb"], r"the package wandb is not installed: pip install 'titan-disp\[wandb\]'"),
        (1, ["--stream.slots", "5"], r"stream.slots is 5; expected a divisor of the global batch 16"),
        (2, ["--stream.slots", "1"], r"stream.slots is 1; .* multiple of the number of data-parallel ranks, 2"),
        (1, ["--validation.enable", "--validation.steps", "-1"], r"validation.steps is -1"),
        (
            1,
            ["--validation.enable", "--validation.steps", "1", "--validation.seq_len", "257"],
            r"validation.seq_len is 257, expected 1 to training.seq_len 256, .* Leave it out",
        ),
        (
            1,
            ["--validation.enable", "--validation.steps", "1", "--validation.seq_len", "0"],
            r"validation.seq_len is 0",
        ),
        (
            2,
            [
                *("--validation.enable", "--validation.steps", "1", "--validation.seq_len", "33"),
                *("--parallelism.tensor_parallel_degree", "2"),
            ],
            r"validation.seq_len 33 is not divisible by tensor_parallel_degree 2",
        ),
        (
            1,
            ["--validation.enable", "--stream.validation_sequences", "12"],
            r"validation_sequences is 12, expected a multiple",
        ),
        (
            1,
            ["--validation.enable", "--stream.validation_sequences", "32", "--validation.steps", "2"],
            r"validation.steps is 2, which would end after \d+ of the stream.validation_sequences 32",
        ),
    ],
)
def test_refused(sample, tmp_path, nproc, change, message, monkeypatch):
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else installed(name, *a))
    with pytest.raises(ConfigError, match=message):
        launch(TrainOptions(str(DEMO), (*options(sample), "--job.dump_folder", str(tmp_path / "run"), *change), nproc))
    assert not (tmp_path / "run").exists(), "a refused run left something behind"


RANGES = {name: facts_of(field) for name, field in all_keys().items() if facts_of(field).range}


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name):
    """Values beside every bound that a key declares are refused by a message that begins with the key."""
    config, facts = load_config([]), RANGES[name]
    check_ranges(config)
    outside = [facts.above, facts.below, math.nan, *([math.inf] if facts.finite else [])]
    outside += [bound + step for bound, step in ((facts.least, -1), (facts.most, 1)) if bound is not None]
    for value in outside:
        if value is not None:
            set_key(config, name, value)
            with pytest.raises(ConfigError, match=rf"^{name} is {value}, expected .*\d"):
                check_ranges(config)


def test_every_number_has_a_range():
    """Other rules check these three: any seed is good, and −1 has a meaning for the others."""
    numbers = {name for name, field in all_keys().items() if field.type in (int, float)}
    assert numbers - RANGES.keys() == {"stream.seed", "training.steps", "validation.seq_len"}


@pytest.mark.parametrize(
    ("facts", "value", "kind", "expected"),
    [
        (Facts(above=0), 0, int, "a number > 0"),
        (Facts(least=1, most=9, noun="steps"), 10, int, r"a number in \[1, 9\]"),
        (Facts(most=3.0), 4.0, float, "a number ≤ 3.0"),
        (Facts(below=3), 3, int, "a number < 3"),
    ],
)
def test_words_of_ranges_that_no_key_has_yet(facts, value, kind, expected):
    with pytest.raises(ConfigError, match=f"^a.b is {value}, expected {expected}$"):
        facts.check("a.b", value, kind)


def test_a_key_is_declared_in_known_words():
    with pytest.raises(ValueError, match="fixes is 'dta'"):
        key(0, fixes="dta")


WORDS = {
    "dispersion.coeff": (-0.1, "a number ≥ 0"),
    "dispersion.tau": (0.0, "a number ≥ 0.0125: exp(-1/tau) must be representable in float32"),
    "stream.retry_seconds": (math.inf, "a finite number ≥ 0"),
    "condensation.interval": (-1, "0 or more steps: 0 means never"),
    "baseline.forget_warmup": (1.0, "a number in [0, 1)"),
    "stream.max_skipped_fraction": (2.0, "a number in [0, 1]"),
    "stream.prefetch": (-1, "0 or more microbatches"),
    "baseline.forget_every": (1, "2 or more steps"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_ranges(name):
    config, (value, expected) = load_config(["--job.config_file", str(DEMO)]), WORDS[name]
    set_key(config, name, value)
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value}, expected {expected}") + "$"):
        check_config(config, 1)


def test_validation_sequences_are_as_long_as_the_trainings_unless_they_are_said_to_be_shorter(sample):
    """TorchTitan's default, 2048, ended a run of 256 at its first validation."""
    for said, expected in (((), 256), (("--validation.seq_len", "200"), 200), (("--training.seq_len", "64"), 64)):
        arguments = ["--job.config_file", str(DEMO), *options(sample), "--validation.enable", "--validation.steps", "1"]
        config = load_config([*arguments, *said])
        check_config(config, 1)
        assert config.validation.seq_len == expected


def write(path, text):
    path.write_text(text)
    return ["--job.config_file", str(path)]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[dispersion]\nlambda = 1.0", r"unknown key .*dispersion.lambda \(did you mean dispersion.coeff\?\)"),
        ("[dispersion]\ntemperature = 1.0", r"dispersion.temperature \(did you mean dispersion.tau\?\)"),
        ("[dispersion]\ncoef = 1.0", r"dispersion.coef \(did you mean dispersion.coeff\?\)"),
        ("[trainig]\nsteps = 1", r"trainig \(did you mean training\?\)"),
        ("[training]\nstep = 1", r"training.step \(did you mean training.steps\?\)"),
        ("training = 3", r"training \(this is a section: write \[training\]\)"),
        ("[dispersion]\ncoeff = 'much'", r"dispersion.coeff is 'much'"),
        ("[training]\nsteps = 'many'", r"training.steps is 'many'"),
        ("[training]\nsteps = true", r"training.steps is True, expected a number"),
        ("[dispersion]\nlayers = 'middle'", r"dispersion.layers is 'middle'"),
        ("[dispersion", r"not valid TOML"),
    ],
)
def test_toml(tmp_path, toml, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "c.toml", toml))


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("--dispersion.enabled false", "--dispersion.no-enabled"),
        ("--dispersion.enabled=False", "--dispersion.no-enabled"),
        ("--dispersion.enabled true", "--dispersion.enabled"),
        ("--dispersion.no-enabled true", "--dispersion.no-enabled"),
        ("--dispersion.no-enabled false", "--dispersion.enabled"),
        ("--compile.enable 1", "--compile.enable"),
        ("--dispersion.layers [1,2]", "--dispersion.layers 1 2"),
        ("--dispersion.layers=[1,2]", "--dispersion.layers 1 2"),
        ("--dispersion.layers 1,2", "--dispersion.layers 1 2"),
        ("--dispersion.layers [1, 2]", "--dispersion.layers 1 2"),  # two words
        ('--dispersion.layers ["last"]', "--dispersion.layers last"),
        (
            '--compile.components ["model","loss"]',
            "--compile.components model,loss",
        ),  # was two strings, ["model" and "loss"]
        ("--compile.components model loss", "--compile.components model,loss"),
    ],
)
def test_options_written_as_in_toml(written, right):
    """The error has the spelling that works, and it does work."""
    argv = ["--job.config_file", str(DEMO)]
    with pytest.raises(ConfigError, match=f"expected {re.escape(right)}$"):
        load_config([*argv, *written.split(" "), "--training.steps", "3"])
    config = load_config([*argv, *right.split(" "), "--training.steps", "3"])
    section, key = re.match(r"--(\w+)\.(?:no-)?(\w+)", right).groups()
    value = right.partition(" ")[2]
    expected = {"enabled": "no-" not in right, "enable": True, "components": ["model", "loss"]}
    expected |= {"layers": "last" if value == "last" else [1, 2]}
    assert getattr(getattr(config, section), key) == expected[key]
    assert config.training.steps == 3


@pytest.mark.parametrize("written", ["--dispersion.lambda 0.5", "--dispersion.lambda=0.5", "--dispersion.lamda 0.5"])
def test_lambda_is_called_coeff(written):
    with pytest.raises(ConfigError, match=r"unknown key --dispersion.lamb?da \(did you mean --dispersion.coeff\?\)"):
        load_config(["--job.config_file", str(DEMO), *written.split()])


def test_torchtitan_says_nothing_of_the_tokenizers_folder(sample, caplog):
    """Its default folder never exists here, and of the config's own our message says more: its warning came before both. What
    else it warns of is said."""
    load_config(["--job.config_file", str(DEMO), *options(sample)])
    load_config(["--job.config_file", str(DEMO), "--model.hf_assets_path", "nowhere"])
    assert "does not exist" not in caplog.text
    load_config(["--job.config_file", str(DEMO), "--model.tokenizer_path", "nowhere"])
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["tokenizer_path is deprecated"]
    torchtitan_logger.warning("HF assets path . does not exist!")
    assert "does not exist" in caplog.text


def test_missing_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the config 'nowhere.toml': No such file or directory$"):
        load_config(["--job.config_file", "nowhere.toml"])
    (tmp_path / "demo_cpu.toml").touch()
    (tmp_path / "zz").mkdir()
    with pytest.raises(ConfigError, match="No such file or directory$"):  # nothing is near, but for the folder's name
        load_config(["--job.config_file", str(tmp_path / "zzz")])
    with pytest.raises(ConfigError, match=r"No such file or directory \(did you mean /.*/demo_cpu\.toml\?\)$"):
        load_config(["--job.config_file", str(tmp_path / "demo_cpu.tml")])
    with pytest.raises(ConfigError, match="Is a directory$"):
        load_config(["--job.config_file", str(tmp_path)])


@pytest.mark.parametrize("layers", ["all", "last", "early_half", "late_half", "[0, 3]"])
def test_layers_from_toml(tmp_path, layers):
    value = layers if layers.startswith("[") else f'"{layers}"'
    config = load_config(write(tmp_path / "c.toml", f"[dispersion]\nlayers = {value}"))
    assert config.dispersion.layers == ([0, 3] if layers.startswith("[") else layers)


def test_command_line_goes_before_toml():
    argv = [
        "--job.config_file",
        str(DEMO),
        "--dispersion.no-enabled",
        "--dispersion.coeff",
        "0.5",
        "--dispersion.layers",
        "1",
        "2",
    ]
    dispersion = load_config(argv).dispersion
    assert (dispersion.enabled, dispersion.coeff, dispersion.layers) == (False, 0.5, [1, 2])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.name)
def test_shipped_configs_are_valid(config):
    ranks = {"qwen3_0.6b_c4.toml": 640, "gpt2_124m_c4.toml": 8, "pretrain_0.6b_c4.toml": 640}.get(config.name, 1)
    check_config(load_config(["--job.config_file", str(config)]), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 240, 320, 384, 480, 640, 960, 1920])
def test_gpu_counts_that_the_paper_config_names(ranks):
    job_config = load_config(["--job.config_file", str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")])
    check_config(job_config, ranks)
    # TorchTitan is handed these: it knows no -1 for replicas.
    parallelism = job_config.parallelism
    assert parallelism.data_parallel_shard_degree == min(8, ranks)
    assert parallelism.data_parallel_replicate_degree == max(1, ranks // 8)


def test_tokenizer_larger_than_the_vocabulary(sample, tmp_path):
    from titan_disp.data.sample import write_sample

    write_sample(tmp_path / "big", vocab_size=3000)
    with pytest.raises(
        ConfigError, match="tokenizer in .* has 3000 tokens, but model.flavor 'nano' has a vocabulary of 2048"
    ):
        launch(
            TrainOptions(
                str(DEMO), (*options(sample), "--model.hf_assets_path", str(tmp_path / "big" / "tokenizer")), 1
            )
        )


def test_console_shows_one_message_and_no_traceback(sample, tmp_path):
    done = subprocess.run(
        command(DEMO, sample, tmp_path / "run", "--dispersion.coeff", "-1", nproc=2),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "titan-disp: error: dispersion.coeff is -1.0, expected a number ≥ 0"
    assert "Traceback" not in done.stdout + done.stderr


def test_ranks_started_by_torchrun_print_it_once(sample):
    """Started without the launcher: rank 0 says it, the others exit with the same status in silence."""
    arguments = ["--job.config_file", str(DEMO), *options(sample), "--dispersion.tau", "0"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "titan_disp.train", *arguments],
            cwd=ROOT,
            env=rank_environment(int(r), 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in "01"
    ]
    texts = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "titan-disp: error: dispersion.tau is 0.0" in texts[0][1]
    assert "titan-disp: error" not in texts[1][1]
    assert not any("Traceback" in out + err for out, err in texts)

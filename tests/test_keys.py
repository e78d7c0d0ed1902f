"""The facts about every key of a config, TorchTitan's and titan-disp's, are checked by
every command.
"""

import dataclasses
import math
import re
import socket
import time
from operator import attrgetter

import pytest
import tomli
import torchtitan
from torchtitan.config import JobConfig

from tests.command_line import DEMO, ROOT, typed
from tests.pages import changed, loaded
from titan_disp import train
from titan_disp.checks import (
    check_config,
    check_device,
    check_inputs,
    check_launched,
    config_warnings,
)
from titan_disp.cluster.freeze import freeze
from titan_disp.cluster.plan import Machine, make_plan, render
from titan_disp.config.keys import torchtitan_facts
from titan_disp.config.load import load_config
from titan_disp.errors import EXIT_CODE, ConfigError
from titan_disp.job_config import all_facts, all_keys
from titan_disp.lab.sweeps.definition import read_sweep
from titan_disp.schedules import curve, learning_rate, schedule_warnings


def key_types(section, prefix=""):
    """Yield the full name and the type of every key of a config class."""
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            yield from key_types(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.type


def test_every_key_of_torchtitan_has_facts():
    """Each has a limit, or a reason for having none, or one for having no effect, and
    not two of these.
    """
    assert torchtitan.__version__ == "0.2.2"
    keys = {name for name, _ in key_types(JobConfig)} - all_keys().keys()
    facts = torchtitan_facts()
    assert facts.keys() == keys
    for name in keys:
        limited = facts[name].limited or bool(facts[name].needs)
        reasons = [limited, bool(facts[name].free), bool(facts[name].unused)]
        assert sum(reasons) == 1, name
    for name, facts_of_key in all_facts().items():
        named = {
            **facts_of_key.when,
            **facts_of_key.unless,
            **facts_of_key.needs,
        }
        assert named.keys() <= all_facts().keys(), name


def test_defaults_are_allowed():
    stock = JobConfig()
    for name, facts in torchtitan_facts().items():
        facts.check(name, attrgetter(name)(stock))
    demo_config = loaded(DEMO)
    for name, facts in all_facts().items():
        facts.check(name, attrgetter(name)(demo_config))


def test_bounds():
    """Every bound is allowed or not, as it says; beside it, the message begins with the
    key.
    """
    types = dict(key_types(type(loaded(DEMO))))
    for name, facts in all_facts().items():
        step = 1 if facts.noun or types[name] in (int, int | None) else 1e-9
        outside = [math.nan] * bool(facts.bounds)
        outside += [math.inf] * bool(facts.bounds)
        for kind, bound in facts.bounds.items():
            inwards = step if kind in ("least", "above") else -step
            if kind in ("least", "most"):
                facts.check(name, bound)
                outside.append(bound - inwards)
            else:
                facts.check(name, bound + inwards)
                outside.append(bound)
        for value in outside:
            if value not in facts.besides:
                with pytest.raises(
                    ConfigError, match=rf"^{name} is {value}, expected .*\d"
                ):
                    facts.check(name, value)
        for value in facts.besides:
            facts.check(name, value)
    limitless = {name for name, kind in types.items() if kind in (int, float)}
    limitless -= {name for name, facts in all_facts().items() if facts.limited}
    # Any seed is good.
    assert {name for name in limitless if name in all_keys()} == {"stream.seed"}


WRONG = {
    "lr_scheduler.total_steps 8": "^the learning rate of step 10 is nan, expected .*: "
    "lr_scheduler.total_steps is 8, but training.steps is 300. Leave total_steps out$",
    "lr_scheduler.total_steps 8 lr_scheduler.warmup_steps 4 lr_scheduler.decay_type "
    "linear lr_scheduler.min_lr_factor 0": "^the learning rate of step 10 is -0.00",
    "training.max_norm -1": "^training.max_norm is -1, expected a number > 0 or inf: "
    ".* for no clipping, write inf$",
    "training.max_norm 0": "^training.max_norm is 0, .* for no clipping, write inf$",
    "optimizer.lr -0.01": "^optimizer.lr is -0.01, expected a number ≥ 0: ",
    "optimizer.lr nan": "^optimizer.lr is nan, expected a number ≥ 0: it is the "
    "highest learning rate, such as 1e-3$",
    "optimizer.lr inf": "^optimizer.lr is inf, expected a number ≥ 0 that is finite",
    "optimizer.lr fast": "^optimizer.lr is 'fast', expected a number ≥ 0: it is the highest "
    "learning rate",
    "optimizer.implementation cuda": "^optimizer.implementation is 'cuda', expected "
    '"for-loop", "foreach" or "fused"$',
    "optimizr.lr 1": r"^unknown option --optimizr.lr \(did you mean --optimizer.lr\?\)$",
    "training.max_norm -inf": "^training.max_norm is -inf, expected a number > 0 or inf: ",
    "optimizer.beta1 -0.1": "^optimizer.beta1 is -0.1, expected a number ≥ 0 and < 1$",
    "optimizer.beta2 1.5": "^optimizer.beta2 is 1.5, expected a number ≥ 0 and < 1$",
    "optimizer.eps -1": "^optimizer.eps is -1.0, expected a number ≥ 0$",
    "optimizer.weight_decay -0.1": "^optimizer.weight_decay is -0.1, expected a number",
    "lr 1e-3": r"^unknown option --lr \(did you mean --optimizer.lr\?\)$",
    "training.learning_rate 1": r"^unknown option --.* \(did you mean --optimizer.lr\?\)$",
    "steps 20": r"\(did you mean --training.steps\?\)$",
    "training.zzz 3": r"^unknown option --training.zzz \(see titan-disp config\)$",
    "zzz 3": r"^unknown option --zzz \(see titan-disp config\)$",
    "checkpoint.enable_checkpoint true": r"\(did you mean --checkpoint.enable\?\)$",
    "enable_checkpoint true": r"\(did you mean --checkpoint.enable\?\)$",
    "training.steps 1e4": r"^training.steps is '1e4', expected 1 or more steps or -1 \(write 10000\)$",
    "training.steps 5m": "^training.steps is '5m', expected 1 or more steps or -1$",
    "training.steps 0,1": "^training.steps is '0,1', expected 1 or more steps or -1$",
    "compile.enable maybe": "^compile.enable is 'maybe', expected true or false$",
    "debug.seed x": "^debug.seed is 'x', expected a number .*: torch's seeds have",
    "debug.seed true": "^debug.seed is 'true', expected a number ≥ ",
    "dispersion.layers middle": "^dispersion.layers is 'middle', expected a list of "
    'whole numbers, "all", "last", "early_half" or "late_half"$',
    "dispersion.layers 1,5.5": "^dispersion.layers is '1,5.5', expected a list of whole",
    "lr_scheduler.decay_type cosin": r"is 'cosin', expected .* \(did you mean cosine\?\)$",
    "training.max_norm none": "^training.max_norm is 'none', expected a number > 0 or inf: "
    "gradients .*; for no clipping, write inf$",
    "optimizer.name Muon": '^optimizer.name is \'Muon\', expected "AdamW" or "Adam": ',
    "optimizer.name SGD": '^optimizer.name is \'SGD\', expected "AdamW" or "Adam": ',
    "optimizer.name adamw": r'expected "AdamW" or "Adam" \(did you mean AdamW\?\): ',
    "optimizer.early_step_in_backward true": "is true, expected false: it applies",
    "lr_scheduler.warmup_steps -5": "warmup_steps is -5, expected 0 or more steps$",
    "lr_scheduler.min_lr_factor -1": "min_lr_factor is -1.0, expected a number ≥ 0 and",
    "lr_scheduler.min_lr_factor 2": "min_lr_factor is 2.0, expected a number ≥ 0 and ≤",
    "lr_scheduler.decay_ratio 1.5": "decay_ratio is 1.5, expected a number ≥ 0 and ≤ 1",
    "lr_scheduler.decay_ratio -0.5": "decay_ratio is -0.5, expected a number ≥ 0",
    "comm.train_timeout_seconds 0": "timeout_seconds is 0, expected a number ≥ 1 and ≤",
    "comm.train_timeout_seconds 1000000000000": "timeout_seconds is 1000000000000, "
    "expected a number ≥ 1 and ≤ 2592000: that is 30 days$",
    "comm.init_timeout_seconds 2592001": "init_timeout_seconds is 2592001, expected ",
    "stream.retry_seconds 1e12": "retry_seconds is 1000000000000.0, expected a number ≥",
    "comm.mode local_tensor": "^comm.mode is 'local_tensor', expected \"default\" or",
    "comm.trace_buf_size -1": "trace_buf_size is -1, expected 0 or more entries",
    "checkpoint.keep_latest_k -3": "keep_latest_k is -3, expected 2 or more checkpoints "
    "or 0: 0 keeps all",
    "checkpoint.load_step -2": "load_step is -2, expected a number ≥ 0 or -1: ",
    "checkpoint.exclude_from_loading optimiser": r"is \['optimiser'\], expected "
    r'"optimizer" or .* \(did you mean optimizer\?\)',
    "checkpoint.exclude_from_loading train_state": "has 'train_state' without "
    "'lr_scheduler', expected both: steps would begin at 1",
    "checkpoint.folder ": "folder is '', expected the name of a folder",
    "checkpoint.initial_load_in_hf_quantized true": "is true, expected false: ",
    "job.dump_folder ": "dump_folder is '', expected a folder, such as",
    "model.converters quantize.float8": "^model.converters has 'quantize.float8', "
    "expected quantize.linear.float8 or",
    "compile.enable true compile.backend inducter": "^compile.backend is 'inducter', "
    r"expected one of cudagraphs, inductor[a-z, _]* \(did you mean inductor\?\)$",
    "compile.components modle": r"is \['modle'\], .* \(did you mean model\?\): TorchTitan",
    "experimental.custom_import nowhere.at_all": "is 'nowhere.at_all', which cannot be "
    "imported: No module named 'nowhere'$",
    "job.custom_config_module nowhere.at_all": "'nowhere.at_all' cannot be read: No",
    "validation.steps 0": "^validation.steps is 0, expected 1 or more steps or -1: -1 ",
    "activation_checkpoint.mode selective activation_checkpoint.selective_ac_option 0": "i"
    "s '0', expected \"op\" or a whole number > 0 in quotes$",
    "dispersion.final_coeff 0.05": "^dispersion.final_coeff is 0.05, expected 0.0: it is "
    "the end of a decay: set dispersion.decay",
    "training.steps 99999999999999999999": "^training.steps is '9{20}', expected 1 or",
    "training.seq_len 1000000000000": "^training.seq_len is 1000000000000, expected a",
    "condensation.sequences 99999999999": "sequences is 9{11}, expected a number ≥ 1 and",
    "parallelism.context_parallel_load_balancer ": 'is \'\', expected "headtail": "ptrr',
    "activation_checkpoint.determinism_check yes": "is 'yes', expected \"default\" or",
    "activation_checkpoint.mode memory_budget": "memory_budget is 0.5, but "
    "compile.enable is false: it divides memory .* Set compile.enable = true$",
    "activation_checkpoint.mode memory_budget compile.enable true compile.components "
    "loss": r"but compile.components is \['loss'\]: .* Set compile.components = 'model'",
    "debug.seed 18446744073709551616": "seed is '18446744073709551616', expected a number",
    "profiling.profile_freq 0": "profile_freq is 0, expected 1 or more steps",
    "profiling.enable_profiling true profiling.profile_freq 3": "profile_freq is 3, "
    "expected at least profiler_warmup 3 \\+ profiler_active 1 = 4",
    "parallelism.tensor_parallel_degree 0": "degree is 0, expected 1 or more ranks$",
    "parallelism.data_parallel_shard_degree -2": "is -2, expected 1 or more shards or -1",
    "dispersion.coeff 1e39": "^dispersion.coeff is 1e.39, expected a number ≥ -1000000",
    "training.local_batch_size 100000000": "expected a number ≥ 1 and ≤ 65536$",
    "checkpoint.folder ../../x": "^checkpoint.folder is '../../x', expected the name of",
    "checkpoint.folder /x": "^checkpoint.folder is '/x', expected the name of a folder",
}


ONE_GPU = ("--gpus-per-node", "1")


@pytest.mark.parametrize("changes", WRONG)
def test_wrong_values_in_plan_and_at_a_start(changes, monkeypatch, capfd):
    """One line, status 2, and no traceback."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    words = changes.split(" ")
    options = [
        f"--{key}={value}" for key, value in zip(words[::2], words[1::2], strict=True)
    ]
    assert typed(monkeypatch, "plan", str(DEMO), *ONE_GPU, *options) == EXIT_CODE
    planned = capfd.readouterr().err.splitlines()
    with pytest.raises(SystemExit) as exit:
        train.main(["--job.config_file", str(DEMO), *options])
    started = capfd.readouterr().err.splitlines()
    assert exit.value.code == EXIT_CODE
    assert planned == started
    (line,) = planned
    with pytest.raises(ConfigError, match=WRONG[changes]):
        raise ConfigError(line.removeprefix("titan-disp: error: "))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "training.steps=20 --optimizer.lr 1",
            "'training.steps=20' is not an option: write --training.steps=20, or put a "
            "value with blanks in quotes",
        ),
        (
            "--optimizer.lr 1 training.steps=20",
            "'training.steps=20' is not an option: write --training.steps=20, or put a "
            "value with blanks in quotes",
        ),
        (
            "--dispersion.enabled training.steps=20",
            "'training.steps=20' is not an option: write --training.steps=20, or put a "
            "value with blanks in quotes",
        ),
        (
            "--job.description two words",
            "job.description is 'two words', expected a string (write 'two words')",
        ),
        ("--training.steps", "training.steps is '', expected 1 or more steps or -1"),
    ],
)
def test_misplaced_words(words, message, monkeypatch, capfd):
    """plan and a start print the same line."""
    options = words.split(" ")
    assert typed(monkeypatch, "plan", str(DEMO), *ONE_GPU, *options) == EXIT_CODE
    planned = capfd.readouterr().err
    with pytest.raises(SystemExit):
        train.main(["--job.config_file", str(DEMO), *options])
    assert planned == capfd.readouterr().err == f"titan-disp: error: {message}\n"


def test_an_unknown_option_of_a_command(monkeypatch, capfd):
    assert typed(monkeypatch, "plan", str(DEMO), "--node", "2") == EXIT_CODE
    assert capfd.readouterr().err == (
        "titan-disp: error: unknown option --node (did you mean --nodes?)\n"
    )


def test_a_plan_names_its_number_of_nodes_only_if_the_mesh_does_not_fit():
    for changes, is_about_ranks in (
        ({"optimizer.lr": -1.0}, False),
        ({"training.seq_len": 1}, False),
        ({"parallelism.data_parallel_shard_degree": 3}, True),
        ({"training.global_batch_size": 10}, True),
        ({"stream.slots": 3}, True),
    ):
        with pytest.raises(ConfigError) as error:
            make_plan(changed(loaded(DEMO), changes), Machine(1, 2))
        assert ("This is for 1 node of 2 GPUs" in str(error.value)) == is_about_ranks


def test_a_start_without_torchrun(monkeypatch, capfd, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as exit:
        train.main(
            ["--job.config_file", str(DEMO), f"--job.dump_folder={tmp_path / 'run'}"]
        )
    assert exit.value.code == EXIT_CODE
    assert capfd.readouterr().err.endswith(
        "titan-disp: error: the environment has no LOCAL_RANK, which torchrun sets: "
        f"start with titan-disp train {DEMO}, or torchrun --nproc-per-node N -m "
        f"titan_disp.train --job.config_file {DEMO}\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_port_that_another_process_uses(monkeypatch, capfd, tmp_path):
    """Where the ranks meet; torchrun's own process may listen there already."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    config = loaded(DEMO)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in {**names, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        message = f"MASTER_PORT is {port}, .* \\(Address already in use\\): set another"
        with pytest.raises(ConfigError, match=message):
            check_launched(config)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        check_launched(config)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    check_launched(config)


def test_no_load_balancer_is_only_possible_on_the_command_line():
    key = "parallelism.context_parallel_load_balancer"
    with pytest.raises(ConfigError, match="is 'ptrr', .* flex .* None, for no balanc"):
        check_config(changed(loaded(DEMO, f"--{key}=ptrr"), {}), 1)
    assert (
        loaded(DEMO, f"--{key}=None").parallelism.context_parallel_load_balancer is None
    )


FLOAT8 = {"model.converters": ["quantize.linear.float8"]}


@pytest.mark.parametrize(
    ("changes", "nested", "message"),
    [
        (FLOAT8, {}, r"needs a GPU .* quantize.linear.float8.emulate = true and"),
        (
            FLOAT8 | {"compile.enable": True},
            {"emulate": True},
            "compile.enable = false$",
        ),
    ],
)
def test_converters_on_a_cpu(changes, nested, message, monkeypatch):
    config = changed(loaded(DEMO), changes)
    for name, value in nested.items():
        setattr(config.quantize.linear.float8, name, value)
    with pytest.raises(ConfigError, match=message):
        check_device(config)


AC = "activation_checkpoint"


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (
            {"lr_scheduler.warmup_steps": 1000},
            "lr_scheduler.warmup_steps 1000 and decay_ratio need 1000 steps, more than "
            "the 300 of the schedule: TorchTitan shortens them to 300 of warm-up and 0 of decay",
        ),
        (
            {"lr_scheduler.decay_ratio": 0.9},
            "lr_scheduler.warmup_steps 60 and decay_ratio need 330 steps, more than the "
            "300 of the schedule: TorchTitan shortens them to 60 of warm-up and 240 of decay",
        ),
        (
            {"memory_estimation.enable": True},
            "memory_estimation.enable is true, which has no effect: only TorchTitan's "
            "script of memory estimation reads it. titan-disp plan estimates memory",
        ),
        (
            {"parallelism.pipeline_parallel_schedule": "GPipe"},
            "parallelism.pipeline_parallel_schedule is 'GPipe', which has no effect: "
            "there are no pipeline stages",
        ),
        ({f"{AC}.mode": "selective", f"{AC}.selective_ac_option": "6"}, None),
        ({"lr_scheduler.decay_ratio": 0.8}, None),
    ],
)
def test_warnings_of_keys(changes, warning):
    config = changed(loaded(DEMO), changes)
    expected = [] if warning is None else [warning]
    check_config(config, 1)
    assert list(config_warnings(config)) == expected
    plan = make_plan(config, Machine(1, 1))
    assert [each for each in plan.warnings if each in expected] == expected


def test_an_option_of_a_converter_that_is_off():
    option = "--quantize.linear.float8.recipe_name=rowwise"
    assert list(config_warnings(loaded(DEMO, option))) == [
        "quantize.linear.float8.recipe_name is 'rowwise', which has no effect: "
        "model.converters does not have the converter"
    ]
    converted = loaded(DEMO, option, "--model.converters=quantize.linear.float8")
    assert list(config_warnings(converted)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--checkpoint.load_step=7"],
            r"^checkpoint.load_step is 7, but .*run/checkpoint holds no checkpoint$",
        ),
        (
            ["--checkpoint.initial_load_path=/nowhere"],
            "initial_load_path '/nowhere' cannot be loaded: it is not a folder; expected",
        ),
        (
            ["--checkpoint.initial_load_path={sample}"],
            "initial_load_path '.*' cannot be loaded: ",
        ),
        (
            ["--checkpoint.initial_load_in_hf"],
            "initial_load_in_hf: '.*tokenizer' holds no ",
        ),
    ],
)
def test_a_plan_looks_at_the_weights_to_load(options, message, sample, tmp_path):
    inputs = (
        f"--model.hf_assets_path={sample}/tokenizer",
        f"--training.dataset_path={sample}",
        f"--job.dump_folder={tmp_path / 'run'}",
    )
    words = [option.format(sample=sample) for option in options]
    config = changed(loaded(DEMO, *inputs, *words), {})
    assert any(re.search(message, w) for w in make_plan(config, Machine(1, 1)).warnings)
    with pytest.raises(ConfigError, match=message):
        make_plan(config, Machine(1, 1), strict=True)
    check_config(config, 1)
    with pytest.raises(ConfigError, match=message):
        check_inputs(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"training.max_norm": math.inf},
        {"training.max_norm": 1},  # a whole number
        {"optimizer.lr": 0.0},
        {"lr_scheduler.total_steps": 1000},  # a part of a longer schedule
        {"lr_scheduler.total_steps": 299},  # the last step has the last rate exactly
        {"lr_scheduler.warmup_steps": 1000},  # TorchTitan takes 300
        {"lr_scheduler.decay_ratio": 0.0},
        {"lr_scheduler.decay_ratio": 1.0},  # TorchTitan takes what warm-up leaves
        {"lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": None},
        {"checkpoint.enable": False, "checkpoint.interval": 0},
        {"checkpoint.keep_latest_k": 0},
        {"debug.seed": -1},
        {"debug.seed": None},
        {"model.converters": ["quantize.linear.float8"]},
        {"parallelism.context_parallel_load_balancer": None},
        {"training.global_batch_size": -1},
        {"checkpoint.exclude_from_loading": ["train_state", "lr_scheduler"]},
        {"compile.enable": True, "compile.backend": "aot_eager"},
    ],
    ids=str,
)
def test_what_works_in_torchtitan_is_allowed(changes):
    check_config(changed(loaded(DEMO), changes), 1)


# ---- the learning rate and λ over the run


def demo(**options):
    words = [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]
    return loaded(DEMO, *words)


def test_the_learning_rate_is_that_of_the_run():
    rate = learning_rate(demo())
    assert list(rate.values) == list(range(1, 301))
    assert rate.first == pytest.approx(1.6e-2 / 60)
    # The first step after the warm-up has the highest rate, too.
    assert (rate.peak_step, rate.peak) == (60, 1.6e-2)
    # Its schedule would end in a step after the last.
    progress = 239 / 240
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
    assert rate.last == pytest.approx(1.6e-2 * expected)
    assert rate.rise <= 1e-12


def test_a_long_run_is_checked_in_less_than_a_fifth_of_a_second():
    config = demo(training__steps=10**6, lr_scheduler__warmup_steps=12_345)
    start = time.process_time()
    rate = learning_rate(config)
    assert time.process_time() - start < 0.2
    assert (rate.peak_step, rate.peak) == (12_345, 1.6e-2)
    steps = list(rate.values)
    assert steps[:64] == list(range(1, 65))
    assert steps[-64:] == list(range(10**6 - 63, 10**6 + 1))
    assert len(steps) < 3000
    # An end of the schedule 10 steps before that of the run is noticed.
    config = changed(
        config,
        {
            "lr_scheduler.total_steps": 10**6 - 10,
            "lr_scheduler.min_lr_factor": 0.0,
            "lr_scheduler.decay_type": "linear",
        },
    )
    with pytest.raises(ConfigError, match=r"^the learning rate of step 999992 is -"):
        check_config(config, 1)


def test_the_peak_is_what_is_furthest_from_zero():
    falling = curve(lambda completed: -0.1 * (completed + 1), 4)
    assert (falling.first, falling.peak, falling.peak_step, falling.last) == (
        -0.1,
        -0.4,
        4,
        -0.4,
    )


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({}, []),
        ({"lr_scheduler.warmup_steps": 300}, []),  # the last step has it
        ({"optimizer.lr": 0.0}, ["optimizer.lr is 0: no weight changes"]),
        (
            {"lr_scheduler.total_steps": 900, "lr_scheduler.warmup_steps": 600},
            [
                "the learning rate never reaches optimizer.lr 0.016: the highest is "
                "0.008, in step 300 of 300. Lower lr_scheduler.warmup_steps"
            ],
        ),
        (
            {"lr_scheduler.total_steps": 200},
            [
                "the learning rate rises again after its peak, to 0.0131617 in the "
                "last step, 300, because lr_scheduler.total_steps is 200. Leave total_steps"
                " out"
            ],
        ),
        (
            {
                "lr_scheduler.total_steps": 250,
                "lr_scheduler.decay_type": "linear",
                "lr_scheduler.min_lr_factor": 0.5,
            },
            [
                "the learning rate falls to 0.00593684 in the last step, below "
                "optimizer.lr × lr_scheduler.min_lr_factor = 0.008"
            ],
        ),
    ],
)
def test_warnings_of_the_learning_rate(changes, warnings):
    config = changed(loaded(DEMO), changes)
    check_config(config, 1)
    assert list(schedule_warnings(config)) == warnings
    assert make_plan(config, Machine(1, 1)).warnings[-len(warnings) or 99 :] == warnings


def test_the_plan_shows_the_learning_rate_and_lambda():
    options = {"dispersion__warmup_steps": 10, "dispersion__decay": "linear"}
    plan = make_plan(demo(**options), Machine(1, 1))
    lines = render(plan).splitlines()
    assert (
        "learning rate   0.000267 in step 1, 0.016 at its peak in step 60, 0.0016 in "
        "the last step"
    ) in lines
    assert (
        "λ               0.01 in step 1, 0.1 at its peak in step 10, 0 in the last step"
    ) in lines
    off = render(make_plan(demo(dispersion__enabled="false"), Machine(1, 1)))
    assert "\nλ " not in off


# ---- ~ and variables in paths


@pytest.mark.parametrize(
    "key", [name for name, facts in all_facts().items() if facts.path]
)
@pytest.mark.parametrize("in_file", [True, False], ids=["file", "option"])
def test_variables_in_paths(key, in_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    content = DEMO.read_text().replace("[job]\ndump_folder", "[job]\n# dump_folder")
    content = content.replace("\nhf_assets_path", "\n# ").replace(
        "\ndataset_path", "\n#"
    )
    config = tmp_path / "c.toml"
    section, _, name = key.partition(".")
    for written, expected in (
        ("~/a", f"{tmp_path}/a"),
        ("$SCRATCH/${SCRATCH}x", "/scratch//scratchx"),
    ):
        options = [] if in_file else [f"--{key}={written}"]
        line = f'{key} = "{written}"\n' if in_file else ""
        config.write_text(content)
        if key == "job.config_file":
            monkeypatch.setenv("SCRATCH", str(tmp_path))
            argv = ["--job.config_file", "$SCRATCH/c.toml"]
            assert load_config(argv).job.config_file == str(config)
            assert load_config(["--job.config_file=~/c.toml"]).job.dump_folder
            return
        toml = tomli.loads(content)
        assert name not in toml.get(section, {}), key
        head = f"[{section}]\n"
        if line and head in content:
            config.write_text(content.replace(head, f'{head}{name} = "{written}"\n'))
        elif line:
            config.write_text(f'{content}\n{head}{name} = "{written}"\n')
        loaded_config = load_config(["--job.config_file", str(config), *options])
        assert getattr(getattr(loaded_config, section), name) == expected


def test_variables_in_the_paths_of_sources_and_sweeps(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", "/scratch")
    (tmp_path / "c.toml").write_text(
        f'{DEMO.read_text()}\n[[stream.sources]]\npath = "$SCRATCH/web"\nweight = 1\n'
    )
    config = load_config(["--job.config_file", str(tmp_path / "c.toml")])
    assert config.stream.sources[0].path == "/scratch/web"
    (tmp_path / "s.toml").write_text(
        '[sweep]\nconfig = "$SCRATCH/c.toml"\nfolder = "$SCRATCH/s"\n'
        '[grid]\n"training.steps" = [1, 2]\n'
    )
    sweep = read_sweep(tmp_path / "s.toml")
    assert (sweep.config, str(sweep.folder)) == ("/scratch/c.toml", "/scratch/s")


def test_a_path_with_an_unknown_variable_or_user_is_refused(monkeypatch):
    monkeypatch.delenv("SCRATCH", raising=False)
    for written, message in (
        (
            "$SCRATCH/runs",
            r"^job.dump_folder is '\$SCRATCH/runs', but \$SCRATCH is no user or "
            "variable here: set the variable, or write the path without it",
        ),
        ("${SCRATCH}/runs", r"but \$\{SCRATCH\} is no user or variable"),
        (
            "~nobody-at-all/runs",
            r"but ~nobody-at-all is no user .* \(write a name that begins with ~ as "
            r"\./~name\)$",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            loaded(DEMO, f"--job.dump_folder={written}")
    assert (ROOT / "train_configs").is_dir()


def test_a_frozen_job_has_the_config_of_a_path_with_a_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (tmp_path / "c.toml").write_text(DEMO.read_text())
    argv = ["--job.config_file", "$SCRATCH/c.toml", "--job.dump_folder=$SCRATCH/run"]
    folder = freeze(load_config(argv), argv, "1.0.a")
    assert folder == tmp_path / "run" / "launch" / "1.0.a"
    assert (folder / "config.toml").read_text() == DEMO.read_text()

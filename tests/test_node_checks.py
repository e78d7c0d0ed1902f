"""How faulty nodes are found and named."""

import json
import re
import resource
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.command_line import DEMO, ROOT
from tests.distributed import spawn
from titan_disp.cluster import bandwidth, node_health, node_reports
from titan_disp.cluster.bandwidth import (
    clock_skews,
    pair_bandwidths,
    rounds,
    slow_links,
    slow_nodes,
)

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"


def ring(count, **slow):
    """Return the pairs of n1 … n{count} at 40 GB/s.

    ``n2=8`` limits the pairs of n2 to 8 GB/s.
    """
    names = [f"n{i + 1}" for i in range(count)]
    pairs = [(names[i], names[j]) for round in rounds(count) for i, j in round]
    return [(a, b, min(slow.get(a, 40), slow.get(b, 40)) * 1e9) for a, b in pairs]


def test_rounds():
    """Every node is paired with two others (of two nodes, with one), and is in at most
    one pair of a round.
    """
    for count in range(13):
        found = rounds(count)
        for pairs in found:
            busy = [node for pair in pairs for node in pair]
            assert len(busy) == len(set(busy))
        pairs = {frozenset(pair) for pairs in found for pair in pairs}
        assert all(
            sum(i in pair for pair in pairs) == min(2, count - 1) for i in range(count)
        )
        assert len(found) <= 3


@pytest.mark.parametrize(
    ("pairs", "nodes"),
    [
        *[
            (ring(count, **{node: 8}), {node})
            for count in (3, 4, 5, 80)
            for node in ("n1", "n2", "n3")
        ],
        (ring(8), set()),
        (ring(8, n4=8, n5=8), {"n4", "n5"}),
        (ring(4, n2=8, n3=8), {"n2", "n3"}),
        (ring(8, n4=21), set()),  # not below half
        (ring(2, n1=8), set()),  # of two nodes, either could be the slow one
        ([], set()),
    ],
)
def test_slow_nodes_and_links_are_named(pairs, nodes):
    assert slow_nodes(pairs) == dict.fromkeys(nodes, 8e9)
    assert slow_links(pairs) == []
    if pairs == ring(8):
        pairs = [
            (a, b, 8e9 if (a, b) == ("n3", "n4") else speed) for a, b, speed in pairs
        ]
        assert slow_nodes(pairs) == {}
        assert slow_links(pairs) == [("n3", "n4", 8e9)]


def test_what_pairs_and_clocks_say():
    """Two ranks per node send 100 bytes each; the slowest of the four takes 4 s. n3's
    clock is 5 s ahead of the others'.

    n1 read its clock late once, so that n3's clock is the median of that reading.
    """
    times = [
        ("n2", {"n10": 1.0}),
        ("n2", {"n10": 2.0}),
        ("n10", {"n2": 4.0}),
        ("n10", {"n2": 1.0}),
    ]
    assert pair_bandwidths(times, 100) == [("n2", "n10", 50.0)]
    readings = {
        "n1": [100.0, 109.0, 102.0],
        "n2": [100.1, 101.1, 102.1],
        "n3": [105.0, 106.0, 107.0],
    }
    assert clock_skews(readings) == pytest.approx(
        {"n1": 0, "n2": 0, "n3": 4.9}, abs=0.11
    )
    found = node_reports.bandwidth_problems(
        {"pairs": [], "clock_skew": {"n1": 0.1, "n2": -7.25, "n3": 3.0}}
    )
    assert found == {
        "n2": ["its clock is 7.2 s behind the others'"],
        "n3": ["its clock is 3.0 s ahead of the others'"],
    }


def node_report(gpus=(H100,) * 8, free=79e9, problems=()):
    numbers = {
        "free_gpu_bytes": free if gpus else 0,
        "free_bytes": 2e12,
        "run_free_bytes": 9e13,
        "clock": 0.0,
    }
    return {"gpus": list(gpus), **numbers, "problems": list(problems)}


def test_locked_memory(tmp_path, monkeypatch):
    """A low limit is a note where there is a fabric that registers memory."""
    limits = {resource.RLIMIT_MEMLOCK: 65536}
    monkeypatch.setattr(resource, "getrlimit", lambda name: [limits.get(name, -1)] * 2)
    fabric = tmp_path / "infiniband"
    monkeypatch.setattr(node_health, "VERBS", fabric)
    assert node_health.check_node(str(tmp_path))["locked_memory_note"] is None
    fabric.mkdir()
    report = node_health.check_node(str(tmp_path))
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "n1.json").write_text(json.dumps(report))
    demo = ["--job.config_file", str(DEMO)]
    notes = node_reports.make_report(tmp_path, ["n1"], "1", demo)["notes"]
    assert notes[0].startswith("n1: a process may lock 65,536 bytes of memory")
    assert report["problems"] == []
    limits.clear()
    assert node_health.check_node(str(tmp_path))["locked_memory_note"] is None


def test_gpus_unlike_the_other_nodes():
    reports = {f"n{i}": node_report() for i in (1, 2, 3)}
    assert (
        node_reports.gpu_problems(reports, "gpu")
        == node_reports.gpu_problems(reports, "8")
        == {}
    )
    assert node_reports.gpu_problems({}, "gpu") == {}
    few = node_reports.gpu_problems(reports, "9")
    assert few["n1"] == [
        "the number of visible GPUs is 8, too few for 9 ranks per node"
    ]
    reports |= {
        "n4": node_report([H100] * 7),
        "n5": node_report([H200] * 8),
        "n6": node_report([]),
    }
    reports |= {"n7": node_report(free=0)}
    most = f"most nodes have 8 × {H100}"
    assert node_reports.gpu_problems(reports, "gpu") == {
        "n4": [f"its GPUs: 7 × {H100}; {most}"],
        "n5": [f"its GPUs: 8 × {H200}; {most}"],
        "n6": ["no GPU is visible", f"its GPUs: none; {most}"],
    }
    # n7's GPU does not compute
    assert node_reports.able_nodes(reports, "gpu") == ["n1", "n2", "n3"]
    mixed = node_reports.gpu_problems({"n1": node_report([H100, H200])}, "gpu")
    assert mixed == {"n1": [f"its GPUs are of different kinds: 1 × {H100}, 1 × {H200}"]}
    # ranks on CPUs
    assert node_reports.able_nodes({"n1": node_report([])}, "4") == ["n1"]


def test_report(tmp_path, monkeypatch, capsys):
    """Of five nodes, one is slow and has a GPU in use, one did not answer, and all
    others miss the data.
    """
    (tmp_path / "nodes").mkdir()
    data = "data: not readable"
    for node in ("n1", "n2", "n4", "n10"):
        problems = ["GPU 3 has 9 of 80 GB free", data] if node == "n2" else [data]
        (tmp_path / "nodes" / f"{node}.json").write_text(
            json.dumps(node_report(problems=problems))
        )
    reduced = {"bytes": 256 << 20, "seconds": 0.01, "bus_bandwidth": 52e9}
    pairs = [
        ["n1", "n2", 9e9],
        ["n2", "n4", 8e9],
        ["n4", "n10", 44e9],
        ["n1", "n10", 45e9],
    ]
    skew = {"n1": 0.0, "n2": -3.5, "n4": 0.01, "n10": 0.0}
    measured = {
        "ranks": 32,
        "backend": "nccl",
        "all_reduce": reduced,
        "pairs": pairs,
        "clock_skew": skew,
    }
    (tmp_path / "bandwidth.json").write_text(json.dumps(measured))
    expected = ["n10", "n1", "n2", "n3", "n4"]
    demo = ["--job.config_file", str(DEMO)]

    def run(what, *more):
        monkeypatch.setattr(sys, "argv", ["node_reports", what, *more])
        node_reports.main()

    nodes = (str(tmp_path), "gpu", " ".join(expected))
    run("able", *nodes)
    assert capsys.readouterr().out == "n1,n2,n4,n10\n"
    with pytest.raises(SystemExit, match="1"):
        run("report", *nodes, *demo)
    lines = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["nodes"]) == ["n1", "n2", "n4", "n10"]
    assert (len(report["problems"]["n2"]), report["problems"]["n1"]) == (4, [data])
    # ranks, of all five nodes, do not divide 16 sequences
    assert "40" in report["problems"]["the config"][0]
    assert [line.split()[0] for line in lines[:6]] == [
        "node",
        "n1",
        "n2",
        "n3",
        "n4",
        "n10",
    ]
    assert re.search(r" -3\.5 s +n1 9\.00, n4 8\.00 +4 problems$", lines[2])
    assert "n4 44.00, n1 45.00" in lines[5]
    for line in (
        "all-reduce of 256 MiB over 32 ranks of 4 nodes: 10.0 ms, bus bandwidth 52.00 GB/s (nccl)",
        "note: not in the bandwidth test: n3",
        "problem: n1, n2, n4, n10: data: not readable",
        "problem: n2: slow: at most 9.00 GB/s with its neighbours; the median node reaches 45.00 GB/s",
        "problem: n3: it did not answer",
    ):
        assert f"\n{line}" in "\n".join(lines)

    (tmp_path / "bandwidth.json").unlink()
    paper = ["--job.config_file", str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")]
    paper += ["--parallelism.data_parallel_shard_degree", "4"]
    report = node_reports.make_report(tmp_path, expected, "4", paper)
    assert report["problems"].keys() == {*expected, "bandwidth"}  # none of the config
    text = "\n".join(node_reports.render(report, expected))
    assert "streamed from the Hugging Face hub by 20 ranks on 5 nodes" in text
    with pytest.raises(SystemExit, match="2"):
        run("folder", *demo, "--job.dump_folder", "/dev/null/run")
    assert (
        "job.dump_folder: /dev/null/run is not writable: Not a directory"
        in capsys.readouterr().err
    )


def test_a_node_with_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: H100)
    error = RuntimeError("CUDA error: uncorrectable ECC error\nmore")
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", mock.Mock(side_effect=[(10e9, 80e9), error])
    )
    monkeypatch.setattr(node_health, "gpu_problems", lambda: ["GPU 0: 3 errors"])
    report = node_health.check_node(str(tmp_path))
    assert (report["gpus"], report["free_gpu_bytes"]) == ([H100, H100], 0)
    broken = "GPU 1: CUDA error: uncorrectable ECC error"
    assert report["problems"] == [
        "GPU 0 has 10 of 80 GB free",
        broken,
        "GPU 0: 3 errors",
    ]


# Output of amd-smi metric --ecc in its change log for ROCm 6.1.1.
AMD_SMI = """GPU: {gpu}
    ECC:
        TOTAL_CORRECTABLE_COUNT: 4
        TOTAL_UNCORRECTABLE_COUNT: {errors}
        CACHE_UNCORRECTABLE_COUNT: {errors}

"""
# Output of rocm-smi --showrasinfo in rocm_smi.py of October 2024.
ROCM_SMI = """
GPU[0]: \tRAS INFO
         Block       Status    Correctable Error  Uncorrectable Error\x20\x20
           UMC        ENABLED                  7                    0\x20\x20
         ATHUB       DISABLED\x20\x20
__________________________________________________________________________________________

GPU[1]: \tRAS INFO
         Block       Status    Correctable Error  Uncorrectable Error\x20\x20
           UMC        ENABLED                  0                    2\x20\x20
           GFX        ENABLED                  1                    1\x20\x20
==========================================================================================
"""
# Lines that drivers wrote to the kernel log, as dmesg shows them. journalctl shows them
# without the time.
XIDS = """[    0.000000] Linux version 6.8.0
[{old}] NVRM: Xid (PCI:0000:10:1c): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[{now}] NVRM: Xid (PCI:0000:0d:00): 31, pid=3234, Graphics SM Warp Exception on (GPC 2, TPC 2, SM 1): Out Of Range Address
[{now}] NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No
[{now}] NVRM: Xid (PCI:0000:01:00): 95, pid=7062, Uncontained: LTC TAG (0x2, 0x1). RST: Yes, D-RST: No
[{now}] NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.
[{now}] NVRM: GPU 0000:2b:00.0: GPU has fallen off the bus.
[{now}] NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.
"""
HARDWARE_XIDS = [
    "GPU at PCI:0000:01:00: Xid 95 within a day: pid=7062, Uncontained: LTC TAG (0x2, 0x1). RST: Yes, D-RST: No",
    "GPU at PCI:0000:2b:00: Xid 79 within a day: GPU has fallen off the bus.",
]


class TestGpuHealth:
    @pytest.fixture
    def tool(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))

        def write(name, output="", arguments="", script="", status=0):
            (tmp_path / f"{name}.out").write_text(output)
            asked = f'[ "$*" = "{arguments}" ] && echo -n "$(<$0.out)"'
            (tmp_path / name).write_text(
                f"#!/bin/bash\n{script or asked}\nexit {status}\n"
            )
            (tmp_path / name).chmod(0o755)

        return write

    ECC = "ecc.errors.uncorrected.volatile.total"
    FAILED = "remapped_rows.failure"
    PENDING = "remapped_rows.pending"
    SOUND = {ECC: "0", FAILED: "No", PENDING: "No", "gpu_recovery_action": "None"}

    def nvidia(self, tool, field, value):
        """The first of two GPUs has this value.

        With None, the driver does not know the field.
        """
        known = {**self.SOUND, field: value}
        case = '*index,{}*) echo "0, {}"; echo "1, {}"; exit;;'
        cases = [
            case.format(name, v, self.SOUND[name]) for name, v in known.items() if v
        ]
        unknown = '*) echo "Field \\"x\\" is not a valid field to query."; exit 2;;'
        tool("nvidia-smi", script="\n".join(['case "$*" in', *cases, unknown, "esac"]))

    @pytest.mark.parametrize(
        ("field", "value", "problem"),
        [
            (
                ECC,
                "3",
                "GPU 0: 3 uncorrectable memory errors since the driver was loaded",
            ),
            (ECC, "[N/A]", None),  # a GPU without ECC
            (FAILED, "Yes", "GPU 0: failed memory could not be remapped (Yes)"),
            (
                PENDING,
                "Yes",
                "GPU 0: remapping failed memory needs a reset of the GPU (Yes)",
            ),
            (
                "gpu_recovery_action",
                "Reset",
                "GPU 0: the driver asks for a recovery action (Reset)",
            ),
            (FAILED, None, None),
        ],
    )
    def test_nvidia(self, tool, field, value, problem):
        """A driver that reports a recovery action knows its Xids, and whether the GPU
        was reset since then.
        """
        self.nvidia(tool, field, value)
        tool("dmesg", XIDS.format(now="9.9", old="1.0"))
        assert node_health.gpu_problems() == ([problem] if problem else [])

    @pytest.mark.parametrize(
        "name", ["nvidia-smi", "amd-smi", "rocm-smi", "journalctl"]
    )
    def test_a_tool_that_hangs(self, tool, monkeypatch, name):
        monkeypatch.setattr(node_health, "LIMIT", 0.2)
        tool(name, script="exec /bin/sleep 20")
        problem = [f"{name} does not answer within 0.2 s"]
        assert node_health.gpu_problems() == (problem if name != "journalctl" else [])

    @pytest.mark.parametrize("journal", [False, True])
    def test_xids(self, tool, monkeypatch, journal):
        """The node has been up for three and a half days.

        The journal is read if only root may run dmesg.
        """
        monkeypatch.setattr(
            node_health, "time", SimpleNamespace(monotonic=lambda: 3.5 * 86400)
        )
        xids = XIDS.format(now=f"{2.6 * 86400:12.6f}", old=f"{2.4 * 86400:12.6f}")
        self.nvidia(tool, "gpu_recovery_action", None)
        tool("dmesg", xids, status=int(journal))
        lines = [
            line.split("] ")[1]
            for line in xids.splitlines()
            if "10:1c): 79" not in line
        ]
        tool(
            "journalctl",
            "\n".join(lines),
            "--dmesg --since=-24h --output=cat --no-pager --quiet",
        )
        assert node_health.gpu_problems() == HARDWARE_XIDS
        if journal:
            tool("journalctl", status=1)
            assert node_health.gpu_problems() == []

    @pytest.mark.parametrize(
        ("amd", "rocm", "problems"),
        [
            ("", "", []),
            (
                AMD_SMI.format(gpu=0, errors="N/A") + AMD_SMI.format(gpu=1, errors=4),
                ROCM_SMI,
                [4],
            ),
            ("", ROCM_SMI, [3]),
            (AMD_SMI.format(gpu=0, errors="N/A"), ROCM_SMI, [3]),
        ],
    )
    def test_amd(self, tool, amd, rocm, problems):
        for name, output, arguments in (
            ("amd-smi", amd, "metric --ecc"),
            ("rocm-smi", rocm, "--showrasinfo"),
        ):
            if output:
                tool(name, output, arguments)
        assert node_health.gpu_problems() == [
            f"GPU 1: {count} uncorrectable errors" for count in problems
        ]


@pytest.mark.parametrize(
    "problem",
    ["GPU {}: CUDA error: uncorrectable ECC error", "GPU {}: \u2192" + 200 * "x"],
)
def test_a_report_is_one_line_of_srun(problem):
    report = {"node": "n1"} | node_report(free=84920000000) | {"clock": 1.7e9}
    assert node_health.report_line(report) == node_health.REPORT + json.dumps(report)
    report["problems"] = [problem.format(i) for i in range(8)] + 8 * [
        "/scratch is not writable: Read-only file system"
    ]
    line = node_health.report_line(report)
    assert 800 < len(line.encode()) <= 1000
    read = json.loads(line[len(node_health.REPORT) :])
    assert read["problems"][0].startswith(report["problems"][0])
    assert {**read, "problems": []} == {**report, "problems": []}


def test_node_health_with_a_config(monkeypatch, sample, tmp_path):
    def check(name, *arguments):
        words = ["--out", out, "--local", out, "--job.config_file", *arguments]
        monkeypatch.setattr(sys, "argv", ["node_health", *map(str, words)])
        node_health.main()
        return json.loads((out / f"{name}.json").read_text())

    run = tmp_path / "run"
    out = tmp_path / "out"
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    options = (
        "--model.hf_assets_path",
        sample / "tokenizer",
        "--training.dataset_path",
        sample,
    )
    report = check("n7", DEMO, *options, "--job.dump_folder", run)
    assert (report["node"], report["problems"]) == ("n7", [])
    assert min(report["free_bytes"], report["run_free_bytes"]) > 0
    # a checkpoint folder would change how the run starts
    assert list(run.iterdir()) == []

    file = tmp_path / "file"
    file.touch()
    options = (
        "--model.hf_assets_path",
        tmp_path,
        "--training.dataset_path",
        tmp_path / "no",
    )
    problems = check("n7", DEMO, *options, "--job.dump_folder", file)["problems"]
    assert [text.split(" ")[0] for text in problems] == [
        str(file),
        "model.hf_assets_path",
        "training.dataset_path",
    ]

    monkeypatch.delenv("SLURMD_NODENAME")  # as in a container
    monkeypatch.setattr(
        node_health.socket, "gethostname", lambda: "gpu10.cluster.example"
    )
    report = check("gpu10", tmp_path / "no.toml")
    assert report["node"] == "gpu10"
    assert "cannot read the config" in report["problems"][0]


def _measure():
    """Of four nodes, the third is slow and the second's clock is 1000 s ahead.

    On a clock of this test, an operation takes 1 ms on the first node, and 0.1 ms
    longer on each next one. Then there are two nodes of two ranks, on a real clock.
    """
    rank = dist.get_rank()
    exchange = bandwidth._exchange
    now = 0.0

    def clock():
        nonlocal now
        now += 1e-3 + 1e-4 * rank
        return now

    def late_exchange(*args):
        nonlocal now
        now += 0.15
        exchange(*args)

    if rank == 2:
        bandwidth._exchange = late_exchange
    ahead = 1000 if rank == 1 else 0
    bandwidth.time = SimpleNamespace(
        time=lambda: time.time() + ahead, perf_counter=clock
    )
    cpu = torch.device("cpu")
    measured = bandwidth.measure(f"n{rank + 1}", 0, cpu, 1 << 16)
    assert bandwidth.objects_of_ranks(measured) == [measured] * 4
    assert measured["ranks"] == 4
    assert measured["all_reduce"]["seconds"] == pytest.approx(1.3e-3)
    assert measured["all_reduce"]["bus_bandwidth"] == pytest.approx(
        1.5 * (1 << 16) / measured["all_reduce"]["seconds"]
    )
    assert list(slow_nodes(measured["pairs"])) == ["n3"]
    seconds = {(a, b): (1 << 16) / speed for a, b, speed in measured["pairs"]}
    assert seconds == pytest.approx(
        {
            ("n1", "n2"): 1.1e-3,
            ("n2", "n3"): 0.15 + 1.2e-3,
            ("n3", "n4"): 0.15 + 1.2e-3,
            ("n1", "n4"): 1.3e-3,
        }
    )
    # all are one host; busy cores may add seconds
    assert measured["clock_skew"]["n2"] == pytest.approx(1000, abs=100)
    assert max(abs(measured["clock_skew"][node]) for node in ("n1", "n3", "n4")) < 100

    bandwidth._exchange = exchange
    bandwidth.time = time
    measured = bandwidth.measure(f"n{rank // 2 + 1}", rank % 2, cpu, 1 << 16)
    ((*pair, speed),) = measured["pairs"]
    assert pair == list(measured["clock_skew"]) == ["n1", "n2"]
    assert speed > 0


def test_measuring_on_four_ranks_and_on_one(one_rank):
    spawn(4, _measure)
    measured = bandwidth.measure("n1", 0, torch.device("cpu"), 1 << 16) | {
        "backend": "gloo"
    }
    assert (measured["pairs"], measured["clock_skew"]) == ([], {"n1": 0.0})
    report = {
        "nodes": {"n1": node_report([])},
        "bandwidth": measured,
        "problems": {},
        "notes": [],
    }
    assert node_reports.render(report, ["n1"])[1].endswith("ok")

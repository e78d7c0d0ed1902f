"""``python -m titan_disp.cluster.node_reports`` summarizes the reports of all nodes, on
the batch host of first_run.sbatch.

    node_reports folder --job.config_file CONFIG …               prints the run folder
    node_reports able DIR NPROC "NODE NODE …"                    prints the nodes that can take part in the bandwidth test
    node_reports report DIR NPROC "NODE NODE …" --job.config_file CONFIG …

DIR holds nodes/NODE.json (from node_health) and bandwidth.json (from bandwidth).
NODE … are the nodes of the job, with NPROC ranks each ("gpu": one rank per GPU).
``report`` writes DIR/report.json, prints a table, and exits with status 1 if there is a
problem.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_disp.checks import check_config, check_device
from titan_disp.cluster.bandwidth import (
    slow_links,
    slow_nodes,
    usual_bandwidth,
)
from titan_disp.cluster.job_check import hub_warnings
from titan_disp.cluster.node_health import in_order, ranks_per_node, writable
from titan_disp.config.load import load_config
from titan_disp.errors import ConfigError, counted, one_line_at_the_end
from titan_disp.templates import templates

# Seconds between clocks. Users compare logs and file times of different nodes, and some
# credentials are valid for a short time.
CLOCK_LIMIT = 2.0
# bytes of a GPU for the bandwidth test: two buffers, and NCCL's own memory
TEST_MEMORY = 2e9
NAMED = 4  # most nodes that one line names

Report = dict[str, Any]
Problems = dict[str, list[str]]  # by node


def collect(
    folder: Path, expected: Sequence[str]
) -> tuple[dict[str, Report], Problems]:
    """Return the reports of the nodes that answered, and the problems of each expected
    node.
    """
    reports: dict[str, Report] = {}
    problems: Problems = {}
    for node in in_order(expected):
        try:
            reports[node] = json.loads((folder / f"{node}.json").read_text())
            problems[node] = list(reports[node]["problems"])
        except (OSError, ValueError):
            text = "it did not answer: its report is missing (the node hangs, or does not see the run folder)"
            problems[node] = [text]
    return reports, problems


def gpus_of(report: Report) -> str:
    """Return a node's GPUs as text, for example "8 × NVIDIA H100 80GB HBM3"."""
    counts: Counter[str] = Counter(report["gpus"])
    return (
        ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
        or "none"
    )


def gpu_problems(reports: Mapping[str, Report], nproc: str) -> Problems:
    """Return the problems of nodes with too few GPUs for the ranks, with different kinds
    of GPUs, or with other GPUs than most nodes.
    """
    if not reports:
        return {}
    problems = defaultdict(list)
    # the first one on a tie
    common = Counter(map(gpus_of, reports.values())).most_common(1)[0][0]
    for node, report in reports.items():
        count = len(report["gpus"])
        if nproc == "gpu" and not count:
            problems[node].append("no GPU is visible")
        elif nproc != "gpu" and 0 < count < int(nproc):
            problems[node].append(
                f"the number of visible GPUs is {count}, too few for {nproc} ranks "
                "per node"
            )
        if gpus_of(report) != common:
            problems[node].append(
                f"its GPUs: {gpus_of(report)}; most nodes have {common}"
            )
        elif len(set(report["gpus"])) > 1:
            problems[node].append(f"its GPUs are of different kinds: {common}")
    return dict(problems)


def able_nodes(reports: Mapping[str, Report], nproc: str) -> list[str]:
    """Return the nodes that can take part in the bandwidth test: their GPUs work and
    are like those of most nodes.
    """
    able = reports.keys() - gpu_problems(reports, nproc).keys()
    return [
        n
        for n, r in reports.items()
        if n in able and (not r["gpus"] or r["free_gpu_bytes"] > TEST_MEMORY)
    ]


def bandwidth_problems(bandwidth: Mapping[str, Any]) -> Problems:
    """Return the problems of nodes with a slow network or a wrong clock."""
    problems = defaultdict(list)
    usual = usual_bandwidth(bandwidth["pairs"])
    for node, best in slow_nodes(bandwidth["pairs"]).items():
        problems[node].append(
            f"slow: at most {best / 1e9:.2f} GB/s with its neighbours; the median "
            f"node reaches {usual / 1e9:.2f} GB/s"
        )
    for node, skew in bandwidth["clock_skew"].items():
        if abs(skew) > CLOCK_LIMIT:
            problems[node].append(
                f"its clock is {abs(skew):.1f} s "
                f"{'ahead of' if skew > 0 else 'behind'} the others'"
            )
    return dict(problems)


def config_problem(
    argv: Sequence[str], nodes: int, nproc: str, reports: Mapping[str, Report]
) -> tuple[list[str], list[str]]:
    """Return the problems of the config, and notes on the config, for ``nodes`` nodes
    that all have the most common number of GPUs.
    """
    counts = [len(report["gpus"]) for report in reports.values()]
    ranks = nodes * ranks_per_node(nproc, max(counts, key=counts.count, default=0))
    if not ranks:
        return [], []
    try:
        job_config = load_config(argv)
        check_config(job_config, ranks)
        check_device(job_config)
    except ConfigError as error:
        return [str(error)], []
    return [], hub_warnings(job_config, ranks, nodes)


def make_report(
    out: Path, expected: Sequence[str], nproc: str, argv: Sequence[str]
) -> Report:
    """Return the content of report.json: the nodes' reports, the bandwidth test, and the
    problems and notes of the nodes, the test and the config.

    ``problems`` has messages by node, "the config" or "bandwidth". ``notes`` are not
    problems by themselves.
    """
    reports, problems = collect(out / "nodes", expected)
    able = able_nodes(reports, nproc)
    file = out / "bandwidth.json"
    bandwidth = json.loads(file.read_text()) if file.exists() else None
    wrong, notes = config_problem(argv, len(expected), nproc, reports)
    _add(problems, gpu_problems(reports, nproc))
    _add(problems, {"the config": wrong})
    if bandwidth is not None:
        _add(problems, bandwidth_problems(bandwidth))
        notes += [
            f"{a} – {b} is slow ({speed / 1e9:.2f} GB/s), but both are fast with others"
            for a, b, speed in slow_links(bandwidth["pairs"])
        ]
        if untested := [node for node in in_order(expected) if node not in able]:
            notes.append(f"not in the bandwidth test: {_named(untested)}")
    elif able:
        failed = "the test failed or hung; its output is above and in the logs"
        _add(problems, {"bandwidth": [failed]})
    locked_memory = defaultdict(list)
    for node, report in reports.items():
        locked_memory[report.get("locked_memory_note")].append(node)
    notes += [f"{_named(n)}: {text}" for text, n in locked_memory.items() if text]
    return {
        "nodes": reports,
        "bandwidth": bandwidth,
        "problems": {key: texts for key, texts in problems.items() if texts},
        "notes": notes,
    }


def _add(problems: Problems, more: Problems) -> None:
    for key, texts in more.items():
        problems.setdefault(key, []).extend(texts)


def _named(nodes: Sequence[str]) -> str:
    text = ", ".join(nodes[:NAMED])
    if len(nodes) > NAMED:
        text += f" and {len(nodes) - NAMED} more"
    return text


def render(report: Report, expected: Sequence[str]) -> list[str]:
    """Return the lines of node_report.txt.j2: the table of nodes, with notes and
    problems below it. Equal problems of several nodes share a line.
    """
    by_text = defaultdict(list)
    for key, texts in report["problems"].items():
        for text in texts:
            by_text[text].append(key)
    template = templates(__file__, gpus=gpus_of, named=_named)
    lines = template.get_template("node_report.txt.j2").render(
        report=report, nodes=in_order(expected), by_text=by_text, counted=counted
    )
    return lines.splitlines()


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "folder":
        with one_line_at_the_end():
            run = Path(load_config(words).job.dump_folder).absolute()
            if problem := writable(str(run)):  # this creates the folder
                raise ConfigError(f"job.dump_folder: {problem}")
        print(run)
        return
    out = Path(words[0])
    nproc = words[1]
    expected = words[2].split()
    if what == "able":
        reports, _ = collect(out / "nodes", expected)
        print(",".join(able_nodes(reports, nproc)))
        return
    report = make_report(out, expected, nproc, argv=words[3:])
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(render(report, expected)))
    sys.exit(int(bool(report["problems"])))


if __name__ == "__main__":
    main()

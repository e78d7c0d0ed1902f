"""``python -m titan_disp.cluster.node_reports`` summarizes the reports of all nodes, on
the batch host of first_run.sbatch.

    node_reports folder --job.config_file CONFIG …                  prints the run folder
    node_reports able   --out DIR --nproc P --expected "n1 n2 …"    prints the nodes that can take part in the bandwidth test
    node_reports report --out DIR --nproc P --expected "n1 n2 …" --job.config_file CONFIG …

DIR holds nodes/NODE.json (from node_health) and bandwidth.json (from bandwidth).
``report`` adds report.json, prints a table, and exits with status 1 if there is a
problem.
"""

import argparse
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
from titan_disp.cluster.job_check import hub_warnings, ranks_per_node
from titan_disp.cluster.node_health import in_order, writable
from titan_disp.config.load import load_config
from titan_disp.errors import ConfigError, counted, one_line_at_the_end
from titan_disp.templates import templates

# seconds: users compare logs and file times of different nodes, and credentials expire
CLOCK_LIMIT = 2.0
# bytes of a GPU for the bandwidth test: two buffers, and NCCL's own memory
TEST_MEMORY = 2e9
NAMED = 4  # most nodes that one line names

Report = dict[str, Any]
Problems = dict[str, list[str]]  # by node


def collect(
    folder: Path, expected: Sequence[str]
) -> tuple[dict[str, Report], Problems]:
    """Read the reports of the nodes that answered.

    Also returns the problems of each expected node.
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
    """Describe a node's GPUs, for example as "8 × NVIDIA H100 80GB HBM3"."""
    counts: Counter[str] = Counter(report["gpus"])
    return (
        ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
        or "none"
    )


def gpu_problems(reports: Mapping[str, Report], nproc: str) -> Problems:
    """Find nodes with too few GPUs for the ranks, with different kinds of GPUs, or with
    other GPUs than most nodes.
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
    """Find nodes with a slow network or a wrong clock."""
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
    """Return the config's problems and notes, for so many nodes with the most common
    number of GPUs.
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
    """Combine the reports, the bandwidth test and the check of the config.

    ``problems`` has messages by node, "the config" or "bandwidth". ``notes`` are no
    problems by themselves.
    """
    reports, problems = collect(out / "nodes", expected)
    able = able_nodes(reports, nproc)
    file = out / "bandwidth.json"
    bandwidth = json.loads(file.read_text()) if file.exists() else None
    wrong, notes = config_problem(argv, len(expected), nproc, reports)
    found = [gpu_problems(reports, nproc), {"the config": wrong}]
    if bandwidth is not None:
        found.append(bandwidth_problems(bandwidth))
        links = slow_links(bandwidth["pairs"])
        notes += [
            f"{a} – {b} is slow ({speed / 1e9:.2f} GB/s), but both are fast with others"
            for a, b, speed in links
        ]
        if untested := [node for node in in_order(expected) if node not in able]:
            notes.append(f"not in the bandwidth test: {_named(untested)}")
    elif able:
        found.append(
            {
                "bandwidth": [
                    "the test failed or hung; its output is above and in the logs of the run folder"
                ]
            }
        )
    for key, texts in (item for more in found for item in more.items()):
        problems.setdefault(key, []).extend(texts)
    problems = {key: texts for key, texts in problems.items() if texts}
    return {
        "nodes": reports,
        "bandwidth": bandwidth,
        "problems": problems,
        "notes": notes,
    }


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
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("what", choices=["folder", "able", "report"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nproc", default="gpu")
    parser.add_argument("--expected", type=str.split, default=[])
    args, titan = parser.parse_known_args()
    if args.what == "folder":
        with one_line_at_the_end():
            run = Path(load_config(titan).job.dump_folder).absolute()
            if problem := writable(str(run)):  # this creates it
                raise ConfigError(f"job.dump_folder: {problem}")
        print(run)
    elif args.what == "able":
        reports, _ = collect(args.out / "nodes", args.expected)
        print(",".join(able_nodes(reports, args.nproc)))
    else:
        report = make_report(args.out, args.expected, args.nproc, titan)
        (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        print("\n".join(render(report, args.expected)))
        sys.exit(int(bool(report["problems"])))


if __name__ == "__main__":
    main()

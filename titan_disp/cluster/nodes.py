"""``python -m titan_disp.cluster.nodes``: what the nodes' reports say together. The batch host's part of preflight.sbatch.

    nodes folder --job.config_file CONFIG …                  prints the run folder
    nodes able   --out DIR --nproc P --expected "n1 n2 …"    prints the nodes that can take part in the bandwidth test
    nodes report --out DIR --nproc P --expected "n1 n2 …" --job.config_file CONFIG …

DIR holds nodes/NODE.json (nodecheck) and bandwidth.json (bandwidth); ``report`` adds report.json, prints a table and ends with
exit status 1 where there is a problem.
"""

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_disp.checks import check_config, check_device
from titan_disp.cluster.bandwidth import Pair, best_bandwidths, slow_links, slow_nodes, usual_bandwidth
from titan_disp.cluster.hub_requests import hub_warnings
from titan_disp.cluster.nodecheck import in_order, writable
from titan_disp.config import load_config
from titan_disp.errors import EXIT_CODE, ConfigError

CLOCK_LIMIT = 2.0  # seconds: logs and file times of different nodes are compared, credentials expire
TEST_MEMORY = 2e9  # bytes of a GPU that the bandwidth test may take: two buffers, and what NCCL takes
NAMED = 4  # nodes that a problem's line names

Report = dict[str, Any]
Problems = dict[str, list[str]]  # by node


def run_folder(argv: Sequence[str]) -> Path:
    """The absolute run folder of a config, made if it is not there.

    Raises:
        ConfigError: the config cannot be read, or the folder not be written.
    """
    run = Path(load_config(argv).job.dump_folder).absolute()
    if problem := writable(str(run)):
        raise ConfigError(f"job.dump_folder: {problem}")
    return run


def collect(folder: Path, expected: Sequence[str]) -> tuple[dict[str, Report], Problems]:
    """The reports of nodes that answered, and all nodes' problems so far."""
    reports: dict[str, Report] = {}
    problems: Problems = {}
    for node in in_order(expected):
        try:
            reports[node] = json.loads((folder / f"{node}.json").read_text())
            problems[node] = list(reports[node]["problems"])
        except (OSError, ValueError):
            problems[node] = [
                "it did not answer: its report is missing (a node that hangs, or does not see the run folder)"
            ]
    return reports, problems


def gpus_of(report: Report) -> str:
    """Such as "8 × NVIDIA H100 80GB HBM3"."""
    counts: Counter[str] = Counter(report["gpus"])
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) or "none"


def unlike_most(values: Mapping[str, str]) -> tuple[str, list[str]]:
    """The most common value, the first of those that are equally common; and the nodes that have another."""
    common = Counter(values.values()).most_common(1)[0][0]
    return common, [node for node, value in values.items() if value != common]


def gpu_problems(reports: Mapping[str, Report], nproc: str) -> Problems:
    """GPUs that are not as many as ranks, of two kinds, or unlike the other nodes'.

    Args:
        nproc: ranks per node, or "gpu" for one per GPU.
    """
    if not reports:
        return {}
    problems = defaultdict(list)
    common, others = unlike_most({node: gpus_of(report) for node, report in reports.items()})
    for node, report in reports.items():
        count = len(report["gpus"])
        if nproc == "gpu" and not count:
            problems[node].append("no GPU is visible")
        elif nproc != "gpu" and 0 < count < int(nproc):
            problems[node].append(f"{count} GPUs are visible for {nproc} ranks per node")
        if node in others:
            problems[node].append(f"its GPUs are {gpus_of(report)}, those of most nodes {common}")
        elif len(set(report["gpus"])) > 1:
            problems[node].append(f"its GPUs are of different kinds: {common}")
    return dict(problems)


def able_nodes(reports: Mapping[str, Report], nproc: str) -> list[str]:
    """Nodes that can take part in the bandwidth test: as many GPUs as the others, all of which compute."""
    unfit = gpu_problems(reports, nproc)
    return [
        node
        for node, report in reports.items()
        if node not in unfit and (not report["gpus"] or report["free_gpu_bytes"] > TEST_MEMORY)
    ]


def bandwidth_problems(bandwidth: Mapping[str, Any]) -> Problems:
    """Nodes that are slow, or whose clocks are off."""
    problems = defaultdict(list)
    pairs: list[Pair] = [tuple(pair) for pair in bandwidth["pairs"]]  # type: ignore[misc]
    usual = usual_bandwidth(pairs)
    for node, best in slow_nodes(pairs).items():
        problems[node].append(
            f"slow: {best / 1e9:.2f} GB/s at most with its neighbours, most nodes reach {usual / 1e9:.2f}"
        )
    for node, skew in bandwidth["clock_skew"].items():
        if abs(skew) > CLOCK_LIMIT:
            problems[node].append(f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the others'")
    return dict(problems)


def config_problem(
    argv: Sequence[str], nodes: int, nproc: str, reports: Mapping[str, Report]
) -> tuple[list[str], list[str]]:
    """Why the config cannot train on so many nodes of as many GPUs as most of them have; and what is to be said else."""
    counts = Counter(len(report["gpus"]) for report in reports.values())
    per_node = int(nproc) if nproc != "gpu" else (counts.most_common(1)[0][0] if counts else 0)
    if not per_node:
        return [], []
    try:
        job_config = load_config(argv)
        check_config(job_config, nodes * per_node)
        check_device(job_config)
    except ConfigError as error:
        return [str(error)], []
    return [], hub_warnings(job_config, nodes * per_node, nodes)


def make_report(out: Path, expected: Sequence[str], nproc: str, argv: Sequence[str]) -> Report:
    """Everything together.

    Returns:
        ``nodes``: their reports; ``bandwidth``: what was measured, or None; ``problems``: by node, "the config" or "bandwidth";
        ``notes``: what is no problem by itself.
    """
    reports, problems = collect(out / "nodes", expected)
    able, file = able_nodes(reports, nproc), out / "bandwidth.json"
    bandwidth = json.loads(file.read_text()) if file.exists() else None
    wrong, notes = config_problem(argv, len(expected), nproc, reports)
    found = [gpu_problems(reports, nproc), {"the config": wrong}]
    if bandwidth is not None:
        found.append(bandwidth_problems(bandwidth))
        links = slow_links([tuple(pair) for pair in bandwidth["pairs"]])  # type: ignore[misc]
        notes += [f"{a} – {b} is slow, {speed / 1e9:.2f} GB/s, though neither is with others" for a, b, speed in links]
        if untested := [node for node in in_order(expected) if node not in able]:
            notes.append(f"not in the bandwidth test: {_named(untested)}")
    elif able:
        found.append(
            {"bandwidth": ["the test failed or hung; what it said is above and in the logs of the run folder"]}
        )
    for more in found:
        for key, texts in more.items():
            problems.setdefault(key, []).extend(texts)
    problems = {key: texts for key, texts in problems.items() if texts}
    return {"nodes": reports, "bandwidth": bandwidth, "problems": problems, "notes": notes}


def _named(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return ", ".join(nodes[:NAMED]) + more


def _row(node: str, report: Report | None, bandwidth: Mapping[str, Any] | None, problems: int) -> list[str]:
    """GPUs, kind, free memory, free disk (local, run folder), clock, GB/s, verdict."""
    verdict = f"{problems} problem{'s' * (problems > 1)}" if problems else "ok"
    if report is None:
        return [node, *["–"] * 7, verdict]
    skew = bandwidth["clock_skew"].get(node) if bandwidth else None
    pairs = [(b if a == node else a, speed) for a, b, speed in (bandwidth or {"pairs": []})["pairs"] if node in (a, b)]
    return [
        node,
        str(len(report["gpus"])),
        "/".join(sorted(set(report["gpus"]))) or "CPU",
        f"{report['free_gpu_bytes'] / 1e9:.0f} GB" if report["gpus"] else "–",
        f"{report['free_bytes'] / 1e9:.0f} GB",
        f"{report['run_free_bytes'] / 1e9:.0f} GB",
        f"{skew:+.1f} s" if skew is not None else "–",
        ", ".join(f"{other} {speed / 1e9:.2f}" for other, speed in pairs) or "–",
        verdict,
    ]


def render(report: Report, expected: Sequence[str]) -> list[str]:
    """A table of the nodes, and below it the problems, the same ones of several nodes in one line."""
    bandwidth, problems = report["bandwidth"], report["problems"]
    head = ["node", "GPUs", "kind", "GPU free", "local free", "run free", "clock", "GB/s with neighbours", ""]
    nodes = in_order(expected)
    rows = [head, *(_row(n, report["nodes"].get(n), bandwidth, len(problems.get(n, []))) for n in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if bandwidth is not None:
        speeds = best_bandwidths(tuple(pair) for pair in bandwidth["pairs"])  # type: ignore[misc]
        reduced = bandwidth["all_reduce"]
        lines.append(
            f"all-reduce of {reduced['bytes'] >> 20} MiB over {bandwidth['ranks']} ranks of {max(1, len(speeds))} nodes: "
            f"{reduced['seconds'] * 1e3:.1f} ms, bus bandwidth {reduced['bus_bandwidth'] / 1e9:.2f} GB/s ({bandwidth['backend']})"
        )
    by_text: dict[str, list[str]] = defaultdict(list)
    for key, texts in problems.items():
        for text in texts:
            by_text[text].append(key)
    lines += [f"note: {note}" for note in report["notes"]]
    lines += [f"problem: {_named(keys)}: {text}" for text, keys in by_text.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("what", choices=["folder", "able", "report"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nproc", default="gpu")
    parser.add_argument("--expected", type=str.split, default=[])
    args, titan = parser.parse_known_args()
    if args.what == "folder":
        try:
            print(os.fspath(run_folder(titan)))
        except ConfigError as error:
            print(f"titan-disp: error: {error}", file=sys.stderr, flush=True)
            sys.exit(EXIT_CODE)
    elif args.what == "able":
        reports, _ = collect(args.out / "nodes", args.expected)
        print(",".join(able_nodes(reports, args.nproc)))
    else:
        report = make_report(args.out, args.expected, args.nproc, titan)
        (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        print("\n".join(render(report, args.expected)))
        sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()

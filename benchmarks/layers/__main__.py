"""Benchmark Colibri beside its peers and within this machine's limits.

    python -m benchmarks.layers --quick      about ten minutes: tiny, small, medium; batches 1, 4, 32
    python -m benchmarks.layers --publish    everything, 55 minutes; writes docs/measured/performance.md
    python -m benchmarks.layers --report     the page of the results so far, measuring nothing

Works with any Python from 3.11: makes its own environment in build/bench/venv and goes on in there.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.common.environment import PYTHON, VENV, setup


def main() -> None:
    """Set the environment up, then hand over to `measure` inside it."""
    options = parse()
    setup()
    if options.setup:
        return
    if sys.prefix != str(VENV):
        os.execv(PYTHON, [str(PYTHON), *sys.orig_argv[1:]])
    from benchmarks.layers.measure import report_so_far, run

    (report_so_far if options.report else run)(options)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="only make the environment")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, batches and rounds")
    parser.add_argument("--publish", action="store_true", help="write results.json here, and docs/measured")
    parser.add_argument("--report", action="store_true", help="only write the page of the results so far")
    parser.add_argument("--minutes", type=float, help="the time a run may take; rounds and peers are fitted to it")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="tiny small medium olmoe mixtral")
    parser.add_argument("--batches", nargs="+", type=int, metavar="N", help="of 1 4 32 128")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="of 1 2")
    parser.add_argument("--rounds", type=int, help="samples of each cell at most")
    parser.add_argument("--peers", nargs="+", metavar="PATTERN", help="only these, for example 'colibri-*' ort-moe")
    parser.add_argument("--no-extras", action="store_true", help="only the time of a call")
    options = parser.parse_args()
    options.sizes = options.sizes or ["tiny", "small", "medium", *([] if options.quick else ["olmoe", "mixtral"])]
    options.batches = options.batches or ([1, 4, 32] if options.quick else [1, 4, 32, 128])
    options.threads = options.threads or [1, 2]
    options.rounds = options.rounds or (9 if options.quick else 15)
    options.minutes = options.minutes or (10 if options.quick else 55)
    return options


if __name__ == "__main__":
    main()

"""The console command ``lightning-resilience``: look at checkpoints, and look after them, without loading them.

Each command is two functions: one gathers a plain document, one renders that document as lines.  ``--json`` prints the
document itself, and nothing else.  Every document carries ``ok``, which is also the exit code: 0 where it is true, 1
where a problem was found; 2 is left to argparse, for wrong usage.

Nothing here imports torch or lightning but ``export``, when it runs, so that a listing answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime, timezone

from lightning_resilience import commands, rendering, typed
from lightning_resilience._version import __version__
from lightning_resilience.commands import PROG, Document, failure
from lightning_resilience.errors import ResilienceError

EXAMPLES = """\
examples:
  lightning-resilience ls runs/7                              what is there, newest first
  lightning-resilience show runs/7/epoch=0-step=1200.ckpt     one checkpoint and its files
  lightning-resilience verify runs/7                          read every byte, compare it with what was saved
  lightning-resilience pull s3://bucket/run7 runs/7           the newest one, from the cold tier
  lightning-resilience export runs/7/epoch=0-step=1200.ckpt model.ckpt    one file, for stock Lightning
  lightning-resilience simulate --mtbf 8h --state-bytes 20e9 --step-time 0.5    what the schedule would cost
  lightning-resilience ls runs/7 --json | jq -r '.checkpoints[0].name'

exit codes: 0 fine, 1 a problem was found, 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of the process where it is None.

    Returns:
        The exit code.

    Raises:
        SystemExit: from argparse, for ``--help``, ``--version`` and wrong usage.
    """
    code = 0
    try:
        try:
            code, lines = _answer(_parser().parse_args(argv))
            for line in lines:
                print(line)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`); what is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        code = 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Look at the checkpoints of a training run, and look after them, without loading them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, help: str, description: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example: {PROG} {name} {example}"
        command = subcommands.add_parser(name, help=help, description=description, epilog=epilog)
        command.set_defaults(wrong_usage=command.error)
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        command.add_argument(
            "--storage-options",
            type=typed.json_object,
            metavar="JSON",
            help="options for URLs, as fsspec takes them; what the environment says is enough for most",
        )
        return command

    command = add(
        "ls",
        "list checkpoints, newest first",
        "List the committed checkpoints of a run, newest first, and what cannot be used, with the cause. "
        "Reads manifests only: `verify` looks at the bytes.",
        "runs/7 --remote s3://bucket/run7",
    )
    command.add_argument("path", metavar="ROOT", help="folder or URL that holds the checkpoints (or one checkpoint)")
    command.add_argument(
        "--remote", type=typed.url, metavar="URL", help="cold tier: say for each checkpoint where it is"
    )
    command.set_defaults(gather=commands.ls, render=rendering.ls)

    command = add(
        "show",
        "show one checkpoint and its files",
        "Show the manifest of one checkpoint, what it holds, and whether its files are there at their size.",
        "runs/7/epoch=0-step=1200.ckpt",
    )
    command.add_argument("path", metavar="CKPT", help="folder or URL of a checkpoint")
    command.set_defaults(gather=commands.show, render=rendering.show)

    command = add(
        "verify",
        "read every byte and compare it with what was saved",
        "Read every byte of all checkpoints of a run, or of one, and compare sizes and digests with the manifest.",
        "runs/7",
    )
    command.add_argument(
        "path", metavar="ROOT_OR_CKPT", help="folder or URL that holds the checkpoints, or of one checkpoint"
    )
    command.set_defaults(gather=commands.verify, render=rendering.verify)

    command = add(
        "pull",
        "copy a checkpoint from a cold tier to a folder",
        "Copy a checkpoint from a cold tier to a folder, every byte checked; stock tools read it there.",
        "s3://bucket/run7 runs/7",
    )
    command.add_argument("path", type=typed.url, metavar="URL", help="cold tier, or one checkpoint in it")
    command.add_argument("folder", metavar="DIR", help="folder that will hold the checkpoint's folder")
    command.add_argument("--step", type=int, help="which one; the newest to resume from if not given")
    command.set_defaults(gather=commands.pull, render=rendering.copies)

    command = add(
        "push",
        "copy checkpoints from a folder to a cold tier",
        "Copy the checkpoints of a folder that a cold tier does not have to it, every byte checked.",
        "runs/7 s3://bucket/run7",
    )
    command.add_argument("path", metavar="DIR", help="folder that holds the checkpoints, or of one checkpoint")
    command.add_argument("url", type=typed.url, metavar="URL", help="cold tier")
    command.add_argument("--step", type=int, help="only the one of this step")
    command.set_defaults(gather=commands.push, render=rendering.copies)

    command = add(
        "export",
        "write one file, as stock Lightning does, from a checkpoint",
        "Write a checkpoint of any strategy as one file, which a stock Trainer goes on from (ckpt_path=FILE) and "
        "load_from_checkpoint takes. Every byte is checked first. It takes as much memory as the file is large.",
        "runs/7/epoch=0-step=1200.ckpt model.ckpt --weights-only",
    )
    command.add_argument("path", metavar="CKPT", help="folder or URL of a checkpoint")
    command.add_argument("file", metavar="FILE", help="what to write")
    command.add_argument("--weights-only", action="store_true", help="leave out what only training goes on with")
    command.add_argument("--force", action="store_true", help="overwrite the file if it is there")
    command.set_defaults(gather=commands.export, render=rendering.export)

    command = add(
        "prune",
        "remove what a rule does not keep",
        "Judge the checkpoints of a folder or a cold tier by a rule, say why each stays or goes, and remove what goes. "
        "The rule is the one that the newest checkpoint records, as `ls` shows it; an option takes the place of a part "
        "of it. Where none is recorded, the options are the rule.",
        "runs/7 --last 3 --milestones 10000 --dry-run",
    )
    command.add_argument("path", metavar="ROOT", help="folder or URL that holds the checkpoints")
    command.add_argument("--last", type=typed.number(1, -1), help="how many of the newest stay; -1: all")
    command.add_argument("--top-k", type=typed.number(0, -1), help="how many of the best stay besides; -1: all")
    command.add_argument("--monitor", help="metric that says which are best")
    command.add_argument("--mode", choices=("min", "max"), help="which scores are best")
    command.add_argument(
        "--milestones", type=typed.number(1), help="one checkpoint for each multiple of so many steps stays"
    )
    command.add_argument(
        "--marked", type=typed.number(0), help="how many of the newest that the schedule labelled milestone stay"
    )
    command.add_argument("--max-bytes", type=typed.size, help="size of all that stay together: 500MB, 1.5T, 10GiB")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.set_defaults(gather=commands.prune, render=rendering.prune)

    for name, does in (("pin", "let no rule remove checkpoints"), ("unpin", "let rules remove checkpoints again")):
        command = add(name, does, f"{does.capitalize()}.", "runs/7/epoch=0-step=1200.ckpt")
        command.add_argument("paths", metavar="CKPT", nargs="+", help="folder or URL of a checkpoint")
        command.set_defaults(gather=commands.pin, render=rendering.pin, pinned=name == "pin")

    command = add(
        "simulate",
        "what a schedule would cost",
        "Run AdaptiveSchedule, fixed intervals and an oracle that knows the failure rate against drawn failures, and "
        "say what share of the time each wastes. What is not given is taken from the ledger of a run folder.",
        "runs/7 --plot waste.png",
    )
    command.add_argument("path", metavar="ROOT", nargs="?", help="run folder whose ledger says what saves cost there")
    command.add_argument(
        "--mtbf", type=typed.duration, help="mean time between failures of the job: 3600, 90min, 8h, 7d"
    )
    command.add_argument("--state-bytes", type=float, help="bytes of one rank's state")
    command.add_argument("--stage-bandwidth", type=float, default=5e9, help="bytes/s of a copy into memory (5e9)")
    command.add_argument("--persist-bandwidth", type=float, default=1e9, help="bytes/s a rank writes to storage (1e9)")
    command.add_argument("--step-time", type=typed.duration, help="seconds of one training step")
    command.add_argument(
        "--restart", type=typed.duration, default=120.0, help="from a failure until training goes on (120)"
    )
    command.add_argument("--noise", type=float, default=0.05, help="standard deviation of the loss (0.05)")
    command.add_argument("--max-overhead", type=float, default=0.01, help="of the schedule (0.01)")
    command.add_argument("--rpo", type=typed.duration, default=1800.0, help="of the schedule (30min)")
    command.add_argument("--prior-mtbf", type=typed.duration, default=86400.0, help="of the schedule (24h)")
    command.add_argument(
        "--runs", type=typed.number(1), help="how many runs are averaged (1, or up to 3 where one sees few failures)"
    )
    command.add_argument("--plot", metavar="FILE", help="draw waste against interval; needs matplotlib")
    command.set_defaults(gather=commands.simulate, render=rendering.simulate)
    return parser


def _answer(options: argparse.Namespace) -> tuple[int, list[str]]:
    """Run one command: its exit code, and the lines for stdout."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # a name or a reason that the terminal cannot show is not a crash
    try:
        document: Document = options.gather(options)
    except (ResilienceError, OSError) as error:
        document = failure(error)
        print("\n".join(filter(None, (f"{PROG}: {document['message']}", document["hint"]))), file=sys.stderr)
        return 1, [json.dumps(document, indent=2)] if options.json else []
    code = 0 if document["ok"] else 1
    if options.json:
        return code, [json.dumps(document, indent=2)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return code, list(options.render(document, width, datetime.now(timezone.utc)))


if __name__ == "__main__":
    sys.exit(main())

"""Is what a run says true? Trains again from its tape, compares every bit, and adds up its lanes.

    python -m recipes.diloco.judge RUN

Prints the model's size and the account as JSON; exit code 1 where anything does not agree.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipes.diloco.learner import plan_of
from recipes.diloco.run import Run
from recipes.diloco.snapshot import Cut
from recipes.diloco.tape import Account, TapeError, account, read_tape, replay


def judge(run: Run) -> Account:
    """Judge a run that has ended.

    Raises:
        TapeError: something does not agree.
    """
    tape, settings = read_tape(run.folder / "tape.jsonl"), run.settings
    first = run.make_island(0)
    plan, header = plan_of(first, settings), first.header
    cut = Cut.load(Path(run.restore), plan, header) if run.restore else None
    model = replay(tape, settings, run.make_island, cut)
    end = Cut.load(run.folder / "final.cut", plan, header)
    differ = [p for p, value in enumerate(model.values) if not np.array_equal(value, end.values[p])]
    if differ:
        raise TapeError(f"Fragments {differ} of the last model are not what the tape gives.")
    added = account(tape, run.takes())
    if added.ends != {lane: one.steps for lane, one in end.lanes.items()}:
        raise TapeError("Lanes do not stand where the tape says.")
    return added


def main(folder: Path) -> None:
    """Judge the run in a folder; what islands write while they train again goes to `replay` in it."""
    run = Run.load(folder)
    if "folder" in run.options:
        run = replace(run, options=run.options | {"folder": str(folder / "replay")})
    print(json.dumps({"parameters": plan_of(run.make_island(0), run.settings).total, **judge(run)._asdict()}))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except TapeError as error:
        sys.exit(str(error))

"""`swarmtrain train`: the reference trainer."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.options import (
    JsonOption,
    ManifestArgument,
    SetOption,
    StepsOption,
    ThreadsOption,
    lock_directory,
    manifest_from,
    print_json,
    state_home,
    use_threads,
)
from swarmtrain.terminal import ProgressBar, on_terminal

if TYPE_CHECKING:
    from swarmtrain.reference import StepReport


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train")(train)


def train(
    manifest: ManifestArgument,
    steps: StepsOption = None,
    set_: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of checkpoints, from which training resumes; default: in the XDG state directory."
        ),
    ] = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Train a manifest in one process without a network: the reference. Resumes from the last checkpoint in OUT."""
    run = manifest_from(manifest, set_, steps)
    use_threads(threads)
    directory = out or state_home() / "train" / f"{run.run.name}-{run.digest()[:12]}"
    lock_directory(directory)
    from swarmtrain.reference import ReferenceTrainer

    trainer = ReferenceTrainer(run, out=directory)
    report: StepReport | None = None
    with ProgressBar() as bar:
        show = _Json() if as_json else _Text(run.schedule.steps, bar)
        if trainer.resumed_from is not None:
            show.note(f"resuming from {trainer.resumed_from}")
        for report in trainer.run():
            show.step(report)
    val_loss = report.val_loss if report else trainer.validate()
    path = report.checkpoint if report else str(trainer.resumed_from)
    show.done(str(path), val_loss)


class _Json:
    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def step(self, report: StepReport) -> None:
        print_json({name: value for name, value in asdict(report).items() if value is not None})

    def done(self, checkpoint: str, val_loss: float | None) -> None:
        print_json({"done": True, "checkpoint": checkpoint, "val_loss": val_loss})


class _Text:
    """A line per validation, and one per ten steps where no bar is drawn."""

    def __init__(self, num_steps: int, bar: ProgressBar) -> None:
        self.num_steps, self._bar = num_steps, bar

    def note(self, text: str) -> None:
        print(text)

    def step(self, report: StepReport) -> None:
        left = (self.num_steps - report.step) * report.tokens / report.step / report.tokens_per_s
        line = (
            f"step {report.step:>6}/{self.num_steps}  loss {report.loss:7.4f}  {report.tokens_per_s:9,.0f} tokens/s  "
            f"norm {report.grad_norm:6.3f}  lr {report.lr:.2e}  {left:5.0f} s left"
        )
        if report.val_loss is not None:
            line += f"  validation {report.val_loss:.4f}"
        if report.val_loss is not None or (not on_terminal() and (report.step % 10 == 0 or report.step == 1)):
            self._bar.keep(line)
        figures = f"step {report.step}/{self.num_steps}  loss {report.loss:.4f}  {report.tokens_per_s:,.0f} tokens/s"
        self._bar.update(report.step, self.num_steps, figures)

    def done(self, checkpoint: str, val_loss: float | None) -> None:
        loss = "none (no validation tokens)" if val_loss is None else f"{val_loss:.4f}"
        print(f"done: validation loss {loss}\ncheckpoint: {checkpoint}")

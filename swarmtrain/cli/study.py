"""`swarmtrain study`: compare compression methods on the same tokens."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.numbers import MAX_SECONDS, number
from swarmtrain.cli.options import (
    JsonOption,
    ManifestArgument,
    SetOption,
    StepsOption,
    ThreadsOption,
    lock_directory,
    manifest_from,
    print_json,
    use_threads,
)
from swarmtrain.errors import StorageError
from swarmtrain.terminal import ProgressBar

if TYPE_CHECKING:
    from swarmtrain.study.results import RunResult
    from swarmtrain.study.runner import Progress


class LinkName(StrEnum):
    """Links for which wall-clock time is projected."""

    slow = "20mbit"
    home = "80mbit"
    fast = "500mbit"
    centre = "100gbit"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("study")(study)


def study(
    manifest: ManifestArgument,
    methods: Annotated[
        str, typer.Option(help="Joined by commas, as in dense,subspace8,quant4/quant8,subspace+quant8 (docs/study.md).")
    ],
    out: Annotated[Path, typer.Option(help="Directory of the results; a study that is started again there resumes.")],
    seeds: Annotated[int, number(1, 1000, help="Trainings per method.")] = 3,
    steps: StepsOption = None,
    set_: SetOption = None,
    link: Annotated[LinkName, typer.Option(help="Link for the plot of loss against time.")] = LinkName.home,
    stage_seconds: Annotated[
        float | None,
        number(
            0,
            MAX_SECONDS,
            help="Compute seconds per token and stage, for projected time; default: the median of all trainings.",
        ),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots (needs matplotlib).")] = True,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Train every method on the same tokens; write tables and plots of loss, bytes and projected time."""
    use_threads(threads)
    from swarmtrain.study.methods import parse_methods
    from swarmtrain.study.runner import Study, study_manifest

    wanted = tuple(parse_methods(methods))
    run = Study(study_manifest(manifest_from(manifest, set_, steps)), wanted, seeds, out)
    run.runs()  # every method must make a valid manifest before the first is trained
    lock_directory(out)
    known = run.results()
    with ProgressBar() as bar:
        show = _Show(as_json, bar)
        if known:
            show.note(f"{len(known)} trainings were finished before")
        for result in run.train(show.step):
            show.result(result)
    _write(run.results(), out, link if plots else None, stage_seconds, show)


def _write(results: list[RunResult], out: Path, link: str | None, stage_s: float | None, show: _Show) -> None:
    from swarmtrain.study.plots import draw
    from swarmtrain.study.results import as_lines
    from swarmtrain.study.tables import as_csv, as_markdown, rows

    table = rows(results, stage_s)
    texts = {"study.csv": as_csv(table), "study.md": as_markdown(table), "study.jsonl": as_lines(results)}
    try:
        for name, text in texts.items():
            (out / name).write_text(text)
        drawn = draw(results, out, link, stage_s) if link is not None else []
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror}", fix="choose another --out") from error
    show.done([*(out / name for name in texts), *drawn])


class _Show:
    """Progress for people, or one object per line."""

    def __init__(self, as_json: bool, bar: ProgressBar) -> None:
        self._as_json, self._bar = as_json, bar

    def note(self, text: str) -> None:
        print(text, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def step(self, progress: Progress) -> None:
        if self._as_json:
            print_json({"event": "progress", **asdict(progress)})
        else:
            self._bar.update(
                round(1000 * (progress.run - 1 + progress.step / progress.num_steps)),
                1000 * progress.num_runs,
                f"{progress.method}, seed {progress.seed} ({progress.run} of {progress.num_runs})  "
                f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.4f}",
            )

    def result(self, result: RunResult) -> None:
        if self._as_json:
            print_json({"event": "result", **asdict(result)})
            return
        self._bar.close()
        loss = f"diverged: {result.diverged}" if result.val_loss is None else f"validation {result.val_loss:.4f}"
        sent = result.costs.forward_bytes + result.costs.backward_bytes
        print(f"{result.method:<28} seed {result.seed:<3} {loss}  {sent:8.1f} bytes/token", flush=True)

    def done(self, paths: list[Path]) -> None:
        if self._as_json:
            print_json({"event": "done", "files": [str(path) for path in paths]})
        else:
            print("\n".join(f"wrote {path}" for path in paths))

"""``girih train``: a trainer, or a launcher that starts several processes.

The launcher imports neither torch nor numba.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from girih import config, strategies
from girih.cli import cli, uncollected
from girih.cli.words import MODEL, PATH, config_options
from girih.cluster.launch import launch, leave_signals_to_launcher
from girih.cluster.launchers.launcher import Launch
from girih.cluster.options import ClusterOptions
from girih.cluster.roles import RoleName
from girih.config.train import MetricsOptions
from girih.config.user_code import KINDS, naming, run_of
from girih.errors import ConfigError, RoleError, UserError
from girih.telemetry.prometheus import require_client
from girih.telemetry.status_file import StatusTarget


@cli.command()
@config_options
@click.option("--run", "run_path", metavar="DIR", type=PATH, help="Where the run is written.")
@click.option("--resume", is_flag=True, help="Continue from the latest checkpoint in --run DIR.")
@click.option(
    "--init-from", "init_from", metavar="RUN|CHECKPOINT",
    help="Begin with the matching rows and dense parameters of another run.",
)  # fmt: skip
@MODEL
@click.option("--plan", "plan_file", metavar="FILE", type=PATH, help="Use a plan of girih plan.")
@click.option(
    "--calibration", "calibrated", metavar="FILE", type=PATH,
    help="Predict samples/s by a file of girih calibrate; the end compares it with the measured speed.",
)  # fmt: skip
@click.option(
    "--cluster", "cluster", metavar="ADDRESS",
    help="Run on a Ray cluster: auto for the cluster of this node, or HOST:PORT of its head.",
)  # fmt: skip
@click.pass_context
def train(
    context: click.Context,
    config_file: Path,
    overrides: tuple[str, ...],
    run_path: Path | None,
    resume: bool,
    init_from: str | None,
    model_class: str | None,
    strategy: str | None,
    plan_file: Path | None,
    calibrated: Path | None,
    cluster: str | None,
) -> int:
    """Train the model of a config file."""
    if resume and run_path is None:
        raise ConfigError("--resume needs --run DIR, the directory of the run to continue")
    if init_from is not None:
        check_init(init_from, run_path)
    typed = list(context.obj)
    overrides = (*overrides, *naming(model_class))
    if run_path is None:
        run_path = Path("runs", f"{config_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        typed += ["--run", str(run_path)]
    try:
        if "RANK" not in os.environ:
            written = config.with_overrides(config_file, overrides, strategy, run_path)
            read = ("strategy", "cluster", "metrics", "train", "checkpoint")
            mapping = config.expand({n: written[n] for n in read if n in written}, str(config_file))
            where, directory = str(config_file), config_file.resolve().parent
            chosen = strategies.create(mapping.get("strategy", {}), f"{where}: [strategy]", directory)
            counts = {RoleName.TRAINER: chosen.trainers, **chosen.roles}
            options = config.build(ClusterOptions, mapping.get("cluster", {}), f"{where}: [cluster]")
            if cluster is not None:
                options = replace(options, launcher="ray", address=cluster)
            if sum(counts.values()) > 1 or options.launcher == "ray":
                command = ["train", *typed]
                if run_of(config_file, run_path) is not None:  # the processes need not check again
                    for kind, name in config.classes_in(written, where).items():
                        command += ["--set", f"{kind}.{KINDS[kind]}={json.dumps(name, ensure_ascii=False)}"]
                one_host = chosen.one_host_option
                if options.launcher == "ray" and one_host and "transport" not in mapping.get("strategy", {}):
                    command, one_host = [*command, "--set", "strategy.transport=tcp"], ""
                return launch(
                    Launch(
                        command=command,
                        again=command if resume else [*command, "--resume"],
                        counts=counts,
                        options=options,
                        outliving=chosen.capabilities.surviving_roles,
                        newest=lambda: _newest(run_path),
                        run=run_path,
                        place=_place(mapping, where, directory, run_path),
                        checkpoints_elsewhere="://" in str(mapping.get("checkpoint", {}).get("dir", "")),
                        on_gpus=mapping.get("train", {}).get("device") == "cuda",
                        one_host=one_host,
                        environment=config.variables_in(written),
                    )
                )
        with uncollected():
            from girih.cli import trainer

        own_process = bool(context.find_root().obj)
        if own_process:
            gc.freeze()  # no collection then searches all imported objects
        leave_signals_to_launcher()
        settings = trainer.load_settings(
            config_file, overrides, strategy, run_path, plan_file=plan_file, calibrated=calibrated
        )
        return trainer.train(settings, run_path, resume=resume, init_from=init_from, own_process=own_process)
    except RoleError as error:
        raise RoleError(f"{error}{_way_on(run_path)}") from error


def check_init(init_from: str, run: Path | None) -> None:
    """Checks the checkpoint of ``--init-from`` before any process starts.

    It must exist, and must not belong to the run itself.
    """
    from girih import checkpoint

    if run is not None and os.path.realpath(init_from) == os.path.realpath(run):
        raise ConfigError(f"--init-from {init_from}: is the run itself; use --resume, or another --run")
    checkpoint.find(init_from)


def _place(mapping: Mapping[str, object], where: str, directory: Path, run: Path) -> StatusTarget:
    """Returns the endpoint at which the processes of a run report."""
    metrics = config.build(MetricsOptions, mapping.get("metrics", {}), f"{where}: [metrics]")
    require_client(metrics)
    return StatusTarget(run.absolute(), metrics.below(directory))


def _way_on(run: Path) -> str:
    """Returns the end of a run's error, which tells the user how to continue.

    Empty if another process reports the error.
    """
    if os.environ.get("RANK", "0") != "0":
        return ""
    if (newest := _newest(run)) is None:
        return "; there is no checkpoint yet: give the same command again"
    return f"; go on from {newest} with: girih train {run / 'config.toml'} --run {run} --resume"


def _newest(run: Path) -> str | None:
    """Returns the name of the last complete checkpoint of a run, or None."""
    from girih import checkpoint

    try:
        return checkpoint.find(run).name
    except UserError:
        return None

"""A sweep over a config with Optuna: trials that fall behind are pruned at their evaluations.

    python recipes/sweep.py config.toml [--trials 20] [--runs runs/sweep] [--storage sqlite:///sweep.db]

Every trial is a run below ``--runs``: `girih compare` and `girih report` put them side by side. With a ``--storage``, several processes (or
machines) may work on one sweep, and one that is started again goes on. What is searched is :func:`suggest`: edit it. Needs
``pip install optuna``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import optuna

import girih
from girih.errors import GirihError, NonFiniteError, UserError

EVERY_STEPS = 50


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """Overrides of the config for one trial."""
    return {
        "sparse_optimizer.lr": trial.suggest_float("sparse_optimizer.lr", 1e-3, 0.5, log=True),
        "dense_optimizer.lr": trial.suggest_float("dense_optimizer.lr", 1e-4, 1e-2, log=True),
    }


class Pruning(girih.Callback):
    """Reports each evaluation of the validation data to a trial, and stops a run whose trial is to be pruned."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial
        self.trainer: girih.Trainer | None = None
        self.pruned = False
        self.best = 0.0

    def on_evaluation(self, record: Any) -> None:
        if record["split"] != "valid" or record["auc"] is None:
            return
        self.best = max(self.best, record["auc"])
        self._trial.report(record["auc"], record["step"])
        if self._trial.should_prune() and self.trainer is not None:
            self.pruned = True
            self.trainer.request_stop()


def objective(config: Path, runs: Path, every_steps: int) -> Any:
    """A function of a trial that trains it, and returns its best AUC on the validation data."""

    def train(trial: optuna.Trial) -> float:
        pruning, run = Pruning(trial), runs / f"trial-{trial.number:03d}"
        overrides = {"train.evaluate_every_steps": every_steps, **suggest(trial)}
        try:
            with girih.Trainer.from_config(
                config, overrides, run=run, callbacks=[pruning], progress=False
            ) as trainer:
                pruning.trainer = trainer
                trainer.fit()
        except NonFiniteError as error:  # a rate too high is an answer too
            raise optuna.TrialPruned(str(error)) from None
        if pruning.pruned:
            raise optuna.TrialPruned
        return pruning.best

    return train


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--storage")
    parser.add_argument("--every-steps", type=int, default=EVERY_STEPS, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    study = optuna.create_study(
        study_name="sweep",
        direction="maximize",
        storage=given.storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=given.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    try:
        study.optimize(objective(given.config, given.runs, given.every_steps), n_trials=given.trials)
    except UserError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except GirihError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(
        f"{len(study.trials)} trials, {pruned} pruned; best AUC {study.best_value:.5f} by trial {study.best_trial.number}:"
    )
    for name, value in study.best_params.items():
        print(f"  --set {name}={value:.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

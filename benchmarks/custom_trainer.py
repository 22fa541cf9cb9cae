"""A user's script with an `ElasticTrainer`: `STORAGE WORKERS BATCH MICROBATCH`."""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_run import RUN_NAME
from ray.train import RunConfig, ScalingConfig

from pipelines.api import ElasticTrainer

CUSTOM_MODEL = Path(__file__).parents[1] / "examples" / "custom_model.py"
UNDISTURBED = dict.fromkeys(("eval_every", "checkpoint.every", "snapshot.every"), 0)


def main() -> None:
    storage, *numbers = sys.argv[1:]
    workers, batch, microbatch = map(int, numbers)
    ElasticTrainer(
        f"{CUSTOM_MODEL}:recipe",
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=RUN_NAME, storage_path=storage),
        layout=f"dp={workers}",
        steps=1_000_000,
        set={"batch": batch, "microbatch": microbatch, **UNDISTURBED},
    ).fit()


if __name__ == "__main__":
    main()

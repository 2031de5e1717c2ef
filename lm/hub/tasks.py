"""Tasks of lm-eval on a model of ours, through a Hugging Face folder that is gone afterwards."""

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from lm.hub.export import Tokens, export
from lm.trained import Trained


def require_lm_eval() -> None:
    """Find out before any work whether lm-eval is there.

    Raises:
        ValueError: it is not.
    """
    for name in ("lm_eval", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--tasks needs {name}, which is not installed: pip install -e '.[eval]', or "
                "measure bits per byte by --text"
            )


def run_tasks(
    trained: Trained,
    tokenizer: Tokens,
    names: list[str],
    include_path: str | None,
    limit: int | None,
    device: str,
) -> str:
    """Results of the tasks, as a table.

    Raises:
        ValueError: a task is not known.
    """
    lm_eval: Any = importlib.import_module("lm_eval")
    tasks: Any = importlib.import_module("lm_eval.tasks")
    manager = tasks.TaskManager(include_path=include_path)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(
            f"--tasks {', '.join(unknown)}: lm-eval has no such task; lm-eval ls tasks lists all, "
            "and --include_path adds yours"
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        export(trained, folder, tokenizer=tokenizer)
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=names,
            task_manager=manager,
            limit=limit,
            device=device,
            bootstrap_iters=1000,
        )
    return importlib.import_module("lm_eval.utils").make_table(results)

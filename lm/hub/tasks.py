"""lm-eval tasks on a trained model, through a temporary Hugging Face folder."""

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from lm.hub.export import export
from lm.hub.tokenizer import Tokens, begins_with_bos
from lm.trained import Trained


def require_lm_eval() -> None:
    """Check before any work that lm-eval is installed.

    Raises:
        ValueError: it is missing.
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
    """Run the tasks and return their results as a table.

    Raises:
        ValueError: a task is unknown.
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
            model_args=model_args(trained, tokenizer, folder),
            tasks=names,
            task_manager=manager,
            limit=limit,
            device=device,
            bootstrap_iters=1000,
        )
    return importlib.import_module("lm_eval.utils").make_table(results)


def model_args(trained: Trained, tokenizer: Tokens, folder: Path) -> dict[str, Any]:
    """Return lm-eval's arguments for a model that is exported to a folder.

    lm-eval drops a bos unless told, and starts a text without context by a bos that the model may
    never have seen.
    """
    bos = begins_with_bos(trained, tokenizer)
    args = {"pretrained": str(folder), "dtype": "float32", "add_bos_token": bos}
    prefix = [*tokenizer.start_ids(bos), tokenizer.special_id("eos")]
    return args | {"prefix_token_id": prefix[0]}

"""Model card of an export."""

from importlib.metadata import version

from lm.hub.config import architecture
from lm.hub.folder import EXPORTED
from lm.trained import Trained


def model_card(trained: Trained, dtype: str, n_bytes: int, vocab_size: int) -> str:
    """Return the README.md of an exported folder."""
    config, facts = trained.config, trained.facts
    contract = facts.get("contract", {})
    rows = {
        "architecture": f"{architecture(config)}, {config.n_layers} layers of {config.d_model}, "
        f"{config.n_heads} heads, context {config.max_seq_len}, vocabulary {vocab_size}",
        "weights": f"{sum(t.numel() for t in trained.weights.values()):,} in training; "
        f"{n_bytes / 1e6:.1f} MB of {dtype} here",
    }
    if contract:
        step = facts["global_step"]
        tokens = step * contract["global batch size"] * contract["data.seq_len"]
        data = contract["data.path"] or contract["data.mixture"]
        rows["trained on"] = f"{data}, {tokens:,} tokens in {step:,} steps"
        rows["precision"] = contract["trainer.precision"]
    for name, key in (("training loss", "train_loss"), ("validation loss", "val_loss")):
        if facts.get(key) is not None:
            rows[name] = f"{facts[key]:.4f} nats a token"
    if config.dropout:
        rows["dropout"] = f"{config.dropout} in training, none here"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"{EXPORTED} {version('relight')}.\n\n| | |\n|---|---|\n{table}\n\n"
        "```python\nfrom transformers import pipeline\n\n"
        'print(pipeline("text-generation", ".")("def main("))\n```\n'
    )

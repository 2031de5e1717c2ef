"""One system of benchmarks/throughput.py, in a process of its own.

    python benchmarks/systems.py NAME JSON_OF_A_SHAPE ALLOCATOR TOKENS WORK_FOLDER

Its own loop runs untouched: steps are timed by a hook that torch calls after each update of an
optimizer. Prints one line of JSON: seconds a step, losses that it gave, peak bytes (resident, or
allocated on the GPU).
"""

import contextlib
import functools
import importlib
import json
import os
import pickle
import resource
import runpy
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shape import Shape

from lm.cpu import keep_freed_memory

SEED = 1337


def width(tokens: Path) -> str | None:
    """Type of token files that do not tell it."""
    return None if (tokens / "meta.json").is_file() else "uint16"


def samples(shape: Shape, tokens: Path) -> Any:
    """Windows of the token file by their number in a run: the order that all systems train in."""
    from data.tokens.source import open_source
    from data.windows import Windows

    source = open_source(str(tokens), shape.vocab_size, width(tokens), None)
    return Windows(source.stream("train", shape.vocab_size), shape.seq_len, SEED)


def batches(shape: Shape, tokens: Path) -> Callable[[int], Any]:
    windows = samples(shape, tokens)
    size = shape.micro_batch
    return lambda n: windows.__getitems__(range(n * size, (n + 1) * size))["input_ids"]


def warmup(shape: Shape) -> int:
    """Steps of the rise, as in yardstick.py."""
    return max(shape.all_steps // 50, 1)


def network(shape: Shape) -> Any:
    """Our model with its first weights, which others start from too."""
    import torch

    from lm.model import LM

    torch.manual_seed(SEED)
    return LM(shape.model_config)


def ours(shape: Shape, tokens: Path, work: Path, *others: str) -> list[float]:
    """`lightning fit` with its log, figures, warnings, clip and schedule, or other options."""
    import csv

    import cli

    options = {
        "seed_everything": SEED,
        "model.config.vocab_size": shape.vocab_size,
        "model.config.d_model": shape.d_model,
        "model.config.n_layers": shape.n_layers,
        "model.config.n_heads": shape.n_heads,
        "model.config.n_kv_heads": shape.n_kv_heads,
        "model.config.ffn_dim": shape.ffn_dim,
        "model.config.tie_embeddings": json.dumps(shape.tied),
        "model.compile": "true",
        "model.optim.lr": 3e-4,
        "model.optim.warmup": warmup(shape),
        "data.path": tokens,
        "data.dtype": width(tokens) or "null",
        "data.seq_len": shape.seq_len,
        "data.micro_batch_size": shape.micro_batch,
        "trainer.precision": "bf16-mixed" if shape.bf16 else "32-true",
        "trainer.accelerator": "cpu" if shape.device == "cpu" else "gpu",
        "trainer.devices": 1,
        "trainer.accumulate_grad_batches": shape.accumulate,
        "trainer.gradient_clip_val": 1.0,
        "trainer.max_steps": shape.all_steps,
        "trainer.log_every_n_steps": 10,
        "trainer.limit_val_batches": 0,
        "trainer.default_root_dir": work / "run",
        "checkpoint.every_n_steps": 10**9,
    }
    code = cli.main(["fit", *(f"--{key}={value}" for key, value in options.items()), *others])
    if code:
        raise SystemExit(code)
    figures = work / "run" / "metrics.csv"
    if not figures.exists():
        return []
    with figures.open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def unwatched(shape: Shape, tokens: Path, work: Path) -> list[float]:
    """The same without any figure, log or warning."""
    off = ["--trainer.logger=false", "--trainer.log_every_n_steps=1000000"]
    return ours(shape, tokens, work, *off, "--health.enabled=false")


def with_options(*others: str) -> Callable[[Shape, Path, Path], list[float]]:
    """`ours` with a switch."""
    return lambda shape, tokens, work: ours(shape, tokens, work, *others)


def experts(shape: Shape, tokens: Path, work: Path) -> list[float]:
    """`ours` with eight experts, of which each position takes two of half the size."""
    width = f"--model.config.ffn_dim={shape.ffn_dim // 2}"
    return ours(shape, tokens, work, width, "--model.config.n_experts=8")


def bare(shape: Shape, tokens: Path, work: Path) -> list[float]:
    """What `ours` computes, without Lightning, logs and figures."""
    import torch

    from lm.config import OptimConfig
    from lm.loss import cross_entropy_sum
    from lm.module import shift
    from lm.optim import build_optimizer
    from lm.schedule import warmup_cosine
    from lm.softmax import native_softmax_step

    net, batch = network(shape), batches(shape, tokens)
    net.model.apply_blocks = torch.compile(net.model.apply_blocks, dynamic=False)
    optimizer = build_optimizer(net, OptimConfig(lr=3e-4), True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, warmup(shape), shape.all_steps, 0.1)
    )
    losses = []
    for step in range(shape.all_steps):
        total = torch.zeros(())
        for micro_step in range(shape.accumulate):
            ids = batch(step * shape.accumulate + micro_step)
            inputs, targets = shift(ids, ids)
            with torch.autocast("cpu", torch.bfloat16, enabled=shape.bf16):
                total_loss = cross_entropy_sum(
                    net.model(inputs), net.head_weight, targets, step=native_softmax_step
                )
                loss = total_loss / (targets.numel() * shape.accumulate)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(total))
    return losses


def hand_written(sound: bool) -> Callable[[Shape, Path, Path], list[float]]:
    def run(shape: Shape, tokens: Path, work: Path) -> list[float]:
        import yardstick

        weights = network(shape).state_dict()
        if shape.tied:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        return yardstick.train(shape, weights, batches(shape, tokens), shape.all_steps, sound)

    return run


def hf(compiled: bool) -> Callable[[Shape, Path, Path], list[float]]:
    def run(shape: Shape, tokens: Path, work: Path) -> list[float]:
        """Hugging Face's Trainer on its Llama, with its default optimizer."""
        import torch

        transformers: Any = importlib.import_module("transformers")

        windows = samples(shape, tokens)

        class Rows(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return shape.all_steps * shape.accumulate * shape.micro_batch

            def __getitem__(self, number: int) -> dict[str, Any]:
                ids = windows.__getitems__([number])["input_ids"][0, :-1]
                return {"input_ids": ids, "labels": ids}

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return torch.utils.data.SequentialSampler(Rows())

        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.d_model,
                intermediate_size=shape.ffn_dim,
                num_hidden_layers=shape.n_layers,
                num_attention_heads=shape.n_heads,
                num_key_value_heads=shape.n_kv_heads,
                max_position_embeddings=shape.seq_len,
                rms_norm_eps=1e-5,
                tie_word_embeddings=shape.tied,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
        model.load_state_dict(network(shape).state_dict(), strict=not shape.tied)
        trainer = InOrder(
            model=model,
            train_dataset=Rows(),
            args=transformers.TrainingArguments(
                output_dir=str(work),
                use_cpu=shape.device == "cpu",
                bf16=shape.bf16,
                torch_compile=compiled,
                per_device_train_batch_size=shape.micro_batch,
                gradient_accumulation_steps=shape.accumulate,
                max_steps=shape.all_steps,
                learning_rate=3e-4,
                weight_decay=0.1,
                adam_beta2=0.95,
                warmup_steps=1,
                lr_scheduler_type="cosine",
                max_grad_norm=1.0,
                logging_steps=10,
                logging_first_step=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row][:1]

    return run


def litgpt(shape: Shape, tokens: Path, work: Path) -> list[float]:
    """litgpt's pretraining on its GPT in Llama's form, from its own first weights."""
    import torch

    pretrain: Any = importlib.import_module("litgpt.pretrain")

    windows = samples(shape, tokens)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, number: int) -> Any:
            return windows.__getitems__([number])["input_ids"][0]

    class Tokens(pretrain.DataModule):
        def connect(self, *_: Any, **__: Any) -> None:
            """Nothing is tokenized here."""

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Rows(), batch_size=shape.micro_batch)

        val_dataloader = train_dataloader

    # It saves its last weights with a copy of a tokenizer; neither is part of a step.
    pretrain.save_checkpoint = lambda *_, **__: None
    with contextlib.suppress(TypeError):  # its closing lines divide by None there
        pretrain.setup(
            "bench",
            model_config=pretrain.Config(
                name="bench",
                block_size=shape.seq_len,
                vocab_size=shape.vocab_size,
                padded_vocab_size=shape.vocab_size,
                n_layer=shape.n_layers,
                n_head=shape.n_heads,
                n_query_groups=shape.n_kv_heads,
                n_embd=shape.d_model,
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
                norm_class_name="RMSNorm",
                norm_eps=1e-5,
                mlp_class_name="LLaMAMLP",
                intermediate_size=shape.ffn_dim,
            ),
            out_dir=work / "litgpt",
            precision="bf16-mixed" if shape.bf16 else "32-true",
            data=Tokens(),
            train=pretrain.TrainArgs(
                save_interval=None,
                log_interval=10,
                global_batch_size=shape.micro_batch * shape.accumulate,
                micro_batch_size=shape.micro_batch,
                max_tokens=shape.all_steps * shape.tokens_per_step,
                max_norm=1.0,
                lr_warmup_steps=1,
                min_lr=3e-5,
                tie_embeddings=shape.tied,
            ),
            eval=pretrain.EvalArgs(interval=10**9, max_iters=1, final_validation=False),
            optimizer={
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
            },
            devices=1,
            logger_name="csv",
        )
    return []


def nanogpt(checkout: str) -> Callable[[Shape, Path, Path], list[float]]:
    def run(shape: Shape, tokens: Path, work: Path) -> list[float]:
        """nanoGPT's train.py on its GPT-2, compiled, with the other settings that it offers."""
        data = work / "nanogpt"
        data.mkdir()
        for split in ("train", "val"):
            (data / f"{split}.bin").symlink_to((tokens / f"{split}.bin").resolve())
        with (data / "meta.pkl").open("wb") as file:
            pickle.dump({"vocab_size": shape.vocab_size}, file)
        settings = {
            "out_dir": work, "dataset": data, "device": shape.device, "compile": True,
            "dtype": "bfloat16" if shape.bf16 else "float32", "dropout": 0.0, "eval_iters": 1,
            "eval_interval": 10**9, "log_interval": 10, "always_save_checkpoint": False,
            "block_size": shape.seq_len, "batch_size": shape.micro_batch,
            "n_layer": shape.n_layers, "n_head": shape.n_heads, "n_embd": shape.d_model,
            "gradient_accumulation_steps": shape.accumulate, "learning_rate": 3e-4,
            "max_iters": shape.all_steps - 1, "lr_decay_iters": shape.all_steps,
            "warmup_iters": 1, "grad_clip": 1.0,
        }  # fmt: skip
        os.chdir(checkout)
        sys.path.insert(0, checkout)
        sys.argv = ["train.py", *(f"--{key}={value}" for key, value in settings.items())]
        runpy.run_path("train.py", run_name="__main__")
        return []

    return run


def minimind(checkout: str) -> Callable[[Shape, Path, Path], list[float]]:
    def run(shape: Shape, tokens: Path, work: Path) -> list[float]:
        """MiniMind's train_pretrain.py on its model (queries and keys normed), compiled."""
        import torch

        windows = samples(shape, tokens)

        class Rows(torch.utils.data.Dataset):
            """In place of its JSONL; a row after another, whichever it asks for."""

            def __init__(self, *_: Any, **__: Any) -> None:
                self.taken = 0

            def __len__(self) -> int:
                return shape.all_steps * shape.accumulate * shape.micro_batch

            def __getitem__(self, number: int) -> tuple[Any, Any]:
                ids = windows.__getitems__([self.taken])["input_ids"][0, :-1]
                self.taken += 1
                return ids, ids

        sys.path.insert(0, checkout)
        model: Any = importlib.import_module("model.model_minimind")
        model.MiniMindConfig = functools.partial(
            model.MiniMindConfig,
            vocab_size=shape.vocab_size,
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.n_kv_heads,
            intermediate_size=shape.ffn_dim,
            max_position_embeddings=shape.seq_len,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            tie_word_embeddings=shape.tied,
        )
        rows: Any = types.ModuleType("dataset.lm_dataset")
        rows.PretrainDataset = Rows
        sys.modules[rows.__name__] = rows
        utils: Any = importlib.import_module("trainer.trainer_utils")
        network = model.MiniMindForCausalLM
        utils.init_model = lambda config, *_, **__: (network(config).to(shape.device), None)
        utils.lm_checkpoint = lambda *_, **__: None
        settings = {
            "save_dir": work, "epochs": 1, "batch_size": shape.micro_batch, "num_workers": 0,
            "accumulation_steps": shape.accumulate, "learning_rate": 3e-4, "grad_clip": 1.0,
            "device": shape.device, "dtype": "bfloat16", "use_compile": 1,
            "log_interval": 10, "save_interval": 10**9, "hidden_size": shape.d_model,
            "num_hidden_layers": shape.n_layers, "max_seq_len": shape.seq_len,
        }  # fmt: skip
        os.chdir(Path(checkout, "trainer"))
        sys.argv = ["train_pretrain.py", *(f"--{key}={value}" for key, value in settings.items())]
        runpy.run_path("train_pretrain.py", run_name="__main__")
        return []

    return run


def main() -> None:
    name, shape_text, allocator, tokens, folder = sys.argv[1:]
    shape = Shape(**json.loads(shape_text))
    kind, _, place = name.partition("=")
    run = {
        "ours": ours,
        "unwatched": unwatched,
        "checkpointed": with_options("--model.config.activation_checkpointing=true"),
        "normed": with_options("--model.config.qk_norm=true"),
        "experts": experts,
        "bare": bare,
        "loop": hand_written(sound=True),
        "plain": hand_written(sound=False),
        "hf": hf(compiled=False),
        "hf-compiled": hf(compiled=True),
        "litgpt": litgpt,
        "nanogpt": nanogpt(place),
        "minimind": minimind(place),
    }[kind]
    if shape.device != "cpu" and kind in ("bare", "loop", "plain"):
        raise SystemExit(f"{kind} runs on a CPU only")
    if shape.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if allocator == "kept":
        keep_freed_memory()
    ends: list[float] = []
    with contextlib.redirect_stdout(sys.stderr):
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def end(*_: Any) -> None:
            # At the two ends of what is timed, and nowhere between.
            if shape.device == "cuda" and len(ends) in (shape.warm_steps - 1, shape.all_steps - 1):
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

        register_optimizer_step_post_hook(end)
        losses = run(shape, Path(tokens).resolve(), Path(folder).resolve())
    if len(ends) != shape.all_steps:
        raise SystemExit(f"{name} made {len(ends)} steps, not {shape.all_steps}")
    if shape.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "seconds": (ends[-1] - ends[shape.warm_steps - 1]) / shape.steps,
        "losses": losses,
        "peak_bytes": peak,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

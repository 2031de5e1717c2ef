"""The parser of a run's configuration, and what is said of mistakes."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from callbacks.config.options import whole_number
from callbacks.config.values import Keys, members, rule
from callbacks.run.patches import argument_types, is_inner_parser

# Keys by the names that other trainers have for them.
ALIASES = {
    "ckpt_path": "resume resume_from resume_from_checkpoint init_from checkpoint_path load ckpt",
    "seed_everything": "seed random_seed manual_seed data_seed",
    "trainer.default_root_dir": "output_dir out_dir save_dir run_dir log_dir root_dir output "
    "dump_folder dirpath folder logging_dir logdir",
    "trainer.max_steps": "max_iters max_iter iters steps num_steps num_train_steps train_steps "
    "max_train_steps total_steps num_iterations train_iters",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps grad_accum_steps accumulate "
    "accumulation_steps grad_accumulation_steps gradient_accumulation grad_acc_steps",
    "trainer.gradient_clip_val": "max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clip "
    "gradient_clipping max_norm clip_norm",
    "trainer.val_check_interval": "eval_interval eval_every eval_steps val_interval val_every "
    "eval_freq eval.interval validation.interval validation.freq val.interval",
    "trainer.limit_val_batches": "eval_iters eval_batches val_batches eval_max_batches "
    "eval.max_iters validation.steps",
    "trainer.log_every_n_steps": "log_interval logging_steps log_every log_freq log_steps",
    "trainer.precision": "mixed_precision mixed_precision_param fp16 bf16 amp torch_dtype dtype",
    "trainer.devices": "gpus n_gpus num_gpus nproc_per_node",
    "trainer.num_nodes": "nodes nnodes n_nodes",
    "trainer.accelerator": "device",
    "trainer.strategy": "backend distributed_backend ddp_backend",
    "trainer.max_time": "max_hours time_limit",
    "model.compile": "torch_compile compile_model",
    "model.from_weights": "pretrained pretrained_model model_name_or_path pretrain_path "
    "load_weights initial_checkpoint_dir",
    "model.config.d_model": "n_embd hidden_size hidden_dim dim embed_dim model_dim width "
    "embedding_size n_embed",
    "model.config.n_layers": "n_layer num_layers num_hidden_layers layers depth num_blocks",
    "model.config.n_heads": "n_head num_heads num_attention_heads heads n_query_heads",
    "model.config.n_kv_heads": "n_kv_head num_key_value_heads num_kv_heads n_query_groups",
    "model.config.head_dim": "head_size d_head",
    "model.config.ffn_dim": "intermediate_size d_ff ffn_hidden_size hidden_ffn mlp_dim dim_ff",
    "model.config.n_experts": "num_experts num_local_experts moe_num_experts",
    "model.config.n_experts_per_token": "num_experts_per_tok experts_per_token moe_top_k",
    "model.config.aux_loss_coef": "router_aux_loss_coef aux_loss_weight",
    "model.config.vocab_size": "padded_vocab_size vocab n_vocab",
    "model.config.tie_embeddings": "tie_word_embeddings tied_embeddings weight_tying",
    "model.config.rope_theta": "rope_base rotary_base",
    "model.config.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.config.init_std": "initializer_range init_method_std",
    "model.config.activation_checkpointing": "gradient_checkpointing recompute",
    "model.optim.lr": "learning_rate max_lr peak_lr base_lr",
    "model.optim.min_lr_ratio": "min_lr min_learning_rate lr_min final_lr",
    "model.optim.warmup": "warmup_steps warmup_iters warmup_ratio lr_warmup_steps num_warmup_steps",
    "model.optim.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "model.optim.eps": "adam_eps adam_epsilon",
    "model.optim.weight_decay": "wd decay",
    "data.path": "data_dir data_path dataset dataset_dir train_data train_file dataset_path "
    "train_path train_data_path val_path val_data_path validation_path val_data",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_file tokenizer_dir",
    "data.seq_len": "block_size context_length ctx_len max_seq_len max_seq_length seq_length "
    "sequence_length max_length max_position_embeddings n_ctx context_size context_len",
    "data.micro_batch_size": "batch_size micro_batch train_batch_size device_batch_size mbs "
    "per_device_train_batch_size per_device_batch_size global_batch_size batch bs "
    "local_batch_size total_batch_size per_device_eval_batch_size eval_batch_size",
    "data.epochs": "num_epochs num_train_epochs n_epochs",
    "data.total_tokens": "max_tokens train_tokens num_tokens tokens",
    "data.num_workers": "workers dataloader_num_workers n_workers",
    "checkpoint.every_n_steps": "save_steps save_interval save_every ckpt_interval save_freq "
    "checkpoint_interval every_n_train_steps checkpoint.interval checkpoint.every",
    "checkpoint.keep_last": "save_total_limit keep_checkpoints max_checkpoints keep_latest_k "
    "save_top_k",
    "samples.every_n_steps": "sample_every sample_interval samples.every",
    "tracker.project": "wandb_project project_name",
    "tracker.run": "wandb_run_name run_name experiment_name exp_name wandb_run",
    "tracker.offline": "tracker.mode wandb_mode",
    "tracker.name": "report_to logger_name wandb wandb_log",
}
MEANT = {alias: key for key, aliases in ALIASES.items() for alias in aliases.split()}


class RunParser(LightningArgumentParser):
    """Parser whose errors are one line with the nearest key."""

    keys: ClassVar[Keys] = {}
    """Keys of the command with their type hints."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def parse_args(self, args: list[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Parse; 1e3 is a whole number too where an argument of a class needs one."""
        try:
            return super().parse_args(args, *rest, **options)
        except ValueError:
            written_out = [
                "=".join(map(whole_number, word.split("=", 1))) if "." in word else word
                for word in args or ()
            ]
            if written_out == args:
                raise
            return super().parse_args(written_out, *rest, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `ValueError` instead of printing the usage of every key."""
        if is_inner_parser(self):  # the outer parser reports it with the key
            raise ValueError(message) from None
        raise ValueError(hinted(" ".join(message.split()), RunParser.keys)) from None


def keys_of(parser: LightningArgumentParser) -> Keys:
    """Return the keys that a parser takes; linked ones are not among them."""
    types = argument_types(parser)
    hints = {key: hint for key, hint in types.items() if not key.endswith("help")}
    return {
        key: hint
        for key, hint in hints.items()
        if hint is not None or any(other.startswith(f"{key}.") for other in hints)
    }


def hinted(message: str, keys: Keys) -> str:
    """The parser's message in short, with the nearest key where one is unknown."""
    message = message.removeprefix('Parser key "config": ')
    if "Does not validate against any of the Union" in message:
        return of_class(message, keys)
    match = re.search(r"does not accept option '([\w.-]+)'|[oO]ption '([\w.-]+)' is not", message)
    match = match or re.search(r"[uU]nrecognized arguments: --?(\w[\w.-]*)", message)
    if loose := re.search(r"[uU]nrecognized arguments: ([^-\s]\S*)", message):
        return not_an_option(loose[1], keys)
    if match is None:
        return re.sub(r'^Parser key "([\w.]+)": ', r"\1: ", message)
    key = next(group for group in match.groups() if group)
    last = key.rsplit(".", 1)[-1]
    ends = {known: known.rsplit(".", 1)[-1] for known in keys}
    last = last if last in ends.values() else last.lower()
    homes = [known for known, end in ends.items() if end == last]
    # The name of an optimizer or a model is not that of a tracker.
    if homes and key not in MEANT and not (last == "name" and "." in key):
        return f"{key} is not a known key; {last} belongs at {' or '.join(homes)}"
    written = key.replace("-", "_").lower()
    alias = difflib.get_close_matches(written.rsplit(".", 1)[-1], MEANT, 1, 0.9)
    meant = MEANT.get(written) or (MEANT[alias[0]] if alias else None)
    if meant in keys:
        return f"{key} is not a known key; did you mean {meant}?"
    level = [known for known in [*keys, "config"] if known.count(".") == key.count(".")]
    near = difflib.get_close_matches(key, level, 1, cutoff=0.7)
    # A common section alone makes two keys no neighbours.
    ends["config"] = "config"
    near = [known for known in near if difflib.get_close_matches(last, [ends[known]], 1, 0.7)]
    near = near or [known for known in keys if len(last) > 3 and known.startswith(key)]
    sections = sorted({known.split(".")[0] for known in keys})
    if not near and (key == last or key.split(".")[0] not in sections):
        for end in difflib.get_close_matches(last, {*ends.values()} - {last}, 1, 0.7):
            near = [known for known in keys if ends[known] == end and "." in known]
    if near:
        return f"{key} is not a known key; did you mean {near[0]}?"
    where = (
        f"lightning fit --help shows the keys of {key.split('.')[0]}"
        if key.split(".")[0] in sections
        else f"the sections are {', '.join(sections)}"
    )
    return f"{key} is not a known key; {where}"


def not_an_option(word: str, keys: Iterable[str]) -> str:
    """Return what is wrong with a word of the command line that no option takes."""
    if word.partition("=")[0] in keys:
        return f"{word} is not an option; write --{word}"
    if word.endswith((".yaml", ".yml", ".json")):
        return f"{word} is not an option; write --config {word}, for each file its own --config"
    return f"{word} is not an option; write --KEY VALUE, with quotes around a value with spaces"


def of_class(message: str, keys: Keys) -> str:
    """Return what is wrong with a value that names a class and its arguments, or is in none.

    At the making of the classes the parser names no key, only its type.
    """
    form = r".*?Subtypes: \[(.*?)\] Errors: (.*) Given value type: .*?Given value: (.*)"
    kinds, errors, value = re.findall(form, message)[0]
    named = re.match(r'Parser key "([\w.]+)"', message)
    typed = [key for key, hint in keys.items() if str([*members(hint)]) == f"[{kinds}]"]
    key = named[1] if named else (typed or ["the configuration"])[0]
    if part := re.search(
        r'Parser key "([\w.]+)": Does not .*?Given value: (.*?)( Given| - |$)', errors
    ):
        subtypes = re.findall(r"Subtypes: \[(.*?)\] Errors:", errors)[-1]
        return f"{key}: {part[1]} is {part[2]}: it must be {in_words(subtypes)}"
    part = re.search(r'Parser key "([\w.]+)": Expected an? (.*?)\. Got value: (.*?) - ', errors)
    if part:
        kind = in_words(part[2])
        quotes = "; write a text that looks like a number in quotes" if kind == "str" else ""
        return f"{key}: {part[1]} is {part[3]}: it must be {kind}{quotes}"
    shows = f"--{key}.help CLASS shows all"
    if unknown := re.search(r"Option '([\w.]+)' is not accepted", errors):
        return f"{key}: {unknown[1]} is not an argument of this class; {shows}"
    classes = re.findall(r"class_path'?[=:] ?'([\w.]+)'", value)
    shown = ", ".join(classes) or value
    if missing := re.search(r"arguments are required: ([\w, ]+?) - ", f"{errors} - "):
        return f"{key} is {shown}: it needs {missing[1]}; give that below init_args ({shows})"
    if package := re.search(r"Requirement '(.*?)' not met", errors):
        return f"{key} is {shown}: it needs {package[1]}; pip install '{package[1]}'"
    if part := re.search(
        r"given class_path '([\w.]+)': (No module named .*?|module .*?) - ", errors
    ):
        return f"{key} is {part[1]}: {part[2]}; check its spelling, or install its package"
    # What the class itself says of its arguments.
    said = [part for part in re.split(r"(?:^| )- ", errors) if part and not NO_REASON.match(part)]
    if said and classes:
        return f"{key} is {shown}: {said[0]}"
    return f"{key} is {shown}: it must be {rule(keys.get(key))}"


NO_REASON = re.compile(r"Expected an? |Not an? |Not of |a class path |a dict |Import path|Problem ")


def in_words(kinds: str) -> str:
    """Return types that the parser names, in words."""
    kinds = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kinds).replace("NoneType", "null")
    kinds = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", r"one of \1", kinds).replace("'", "")
    return kinds.replace("timedelta", "a duration such as 0:30:00").replace(", null", " or null")

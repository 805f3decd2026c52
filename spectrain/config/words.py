"""What other tools call our options: the words of transformers, axolotl, vLLM, speculators and SpecForge."""

from __future__ import annotations

from collections.abc import Collection

from spectrain.errors import closest

# Each option with the words for it. A word of several options is for the first of them that a command has.
WORDS = {
    "optimizer.lr": "lr learning_rate peak_lr max_lr",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.warmup_steps": "warmup warmup_steps num_warmup_steps",
    "optimizer.warmup_share": "warmup_ratio",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler scheduler_type",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.name": "optim optimizer_type",
    "data.batch_size": "batch_size train_batch_size per_device_train_batch_size micro_batch_size global_batch_size bs",
    "batch_size": "max_num_seqs max_batch_size num_concurrent_requests per_device_eval_batch_size",
    "epochs": "num_train_epochs n_epochs",
    "max_steps": "epochs num_epochs steps num_steps train_steps max_num_steps total_steps max_train_steps iterations",
    "hours": "max_time time_limit",
    "corpus": "dataset datasets train_data train_file data_path train_data_path dataset_name dataset_path",
    "prompts": "dataset datasets dataset_path dataset_name prompt_file questions eval_data bench_list benchmark_list",
    "corpus.max_documents": "max_samples max_train_samples",
    "limit": "max_samples num_prompts num_samples n_prompts num_questions",
    "max_length": "max_model_len max_seq_len max_seq_length context_length sequence_len",
    "data.row_tokens": "max_length max_model_len max_seq_len max_seq_length seq_length seq_len sequence_len block_size",
    "max_new_tokens": "max_length max_tokens output_len gen_len max_gen_toks max_output_tokens",
    "target": "model model_name model_path model_name_or_path base_model verifier verifier_name_or_path "
    "target_model target_model_path",
    "drafter": "draft_model draft draft_model_path speculative_model draft_model_config speculator assistant_model",
    "method": "speculative_algorithm algorithm speculative_method",
    "method.gamma": "gamma num_speculative_tokens num_assistant_tokens speculative_num_draft_tokens spec_length",
    "k": "num_speculative_tokens ttt_length speculative_num_steps gamma",
    "ttt_steps": "num_speculative_tokens ttt_length speculative_num_steps gamma",
    "n_layer": "num_layers num_hidden_layers n_layers",
    "draft_vocab": "draft_vocab_size",
    "target_layers": "target_layer_ids layer_ids",
    "sampling.temperature": "temperature temp",
    "sampling.top_k": "top_k topk",
    "sampling.top_p": "top_p",
    "target.dtype": "dtype torch_dtype quantization load_in_8bit load_in_4bit",
    "trainer.precision": "bf16 fp16 mixed_precision precision",
    "target.device": "device device_map",
    "target.tp": "tp tp_size tensor_parallel_size tensor_parallel",
    "trainer.devices": "num_gpus gpus n_gpus nproc_per_node devices num_processes",
    "trainer.strategy": "fsdp deepspeed strategy",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps grad_accum accumulation_steps grad_accumulation",
    "trainer.activation_checkpointing": "gradient_checkpointing activation_checkpointing",
    "trainer.gradient_clip_val": "max_grad_norm grad_clip gradient_clipping clip_grad_norm",
    "trainer.log_every_n_steps": "logging_steps log_interval log_steps log_every",
    "trainer.val_check_interval": "eval_steps eval_interval eval_freq val_interval save_every_epoch",
    "checkpoint_s": "save_steps save_interval save_freq",
    "logger": "report_to use_wandb wandb wandb_project tensorboard",
    "out": "output output_dir output_path out_dir save_dir save_path save_folder output_file",
    "fresh": "overwrite overwrite_output_dir force",
    "run_dir": "resume_from_checkpoint resume checkpoint_dir ckpt_dir checkpoint",
    "memory": "gpu_memory_utilization mem_fraction_static",
    "name": "served_model_name",
    "system": "system_prompt",
    "plan": "dry_run",
}
# Words that are taken for the first of these options that the command has.
ALIASES = {
    "lr": ("optimizer.lr",),
    "learning_rate": ("optimizer.lr",),
    "batch_size": ("data.batch_size",),
    "epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "dataset": ("corpus", "prompts"),
    "max_length": ("max_length", "data.row_tokens"),
}


def did_you_mean(wrong: str, options: Collection[str]) -> str:
    """Return "; did you mean ...?" with the option of a command that was meant by a wrong one, or "" if none is."""
    words = {word: option for option in reversed(WORDS) if option in options for word in WORDS[option].split()}
    near = wrong if wrong in words else closest(wrong, [*options, *words])
    return f"; did you mean {words.get(near, near)}?" if near else ""

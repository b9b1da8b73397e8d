"""The keys of a DeepSpeed JSON: what each is in a stage, which values are taken, and why some are refused."""

from __future__ import annotations

from typing import Any

from megatron_palimpsa.config.zero import SAME_NAMES

SECTION = "parallel.deepspeed"

OURS = {
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": f"{SECTION}.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.clip_grad",
    "zero_optimization.stage": f"{SECTION}.zero_stage",
    **{f"zero_optimization.{name}": f"{SECTION}.{name}" for name in SAME_NAMES},
    "zero_optimization.offload_optimizer.pin_memory": f"{SECTION}.pin_memory",
    "zero_optimization.offload_param.pin_memory": f"{SECTION}.pin_memory",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    **{
        f"fp16.{name}": f"{SECTION}.fp16.{name}"
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    },
}
"""Keys whose value is that of a key of the stage."""

FIXED: dict[str, tuple[Any, ...]] = {
    "communication_data_type": ("fp32", "torch.float32", None),
    "data_types.grad_accum_dtype": ("fp32", "torch.float32", None),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1,),
    "bf16.immediate_grad_update": (True, False),
    "bf16.check_grad_overflow": (True, False),
    "fp16.auto_cast": (False,),
    "fp16.consecutive_hysteresis": (False,),
    "optimizer.type": ("AdamW", "Adam"),
    "optimizer.params.torch_adam": (True,),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.amsgrad": (False,),
    "zero_allow_untested_optimizer": (True,),
    "zero_force_ds_cpu_optimizer": (False,),
    "wall_clock_breakdown": (False,),
    "zero_optimization.contiguous_gradients": (True,),
    "zero_optimization.reduce_scatter": (True,),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.round_robin_gradients": (False,),
    "zero_optimization.ignore_unused_parameters": (True,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, False),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "zero_optimization.offload_optimizer.ratio": (1,),
    "zero_optimization.offload_param.device": ("cpu", "none"),
    "bf16.enabled": (True, False),
    "fp16.enabled": (True, False),
}
"""Keys whose value decides nothing here, or more than one key of the stage, and the values that are taken."""

IGNORED = {"steps_per_print"}
"""Of DeepSpeed's own log, which is off."""

REFUSED = {
    "zero_quantized_weights": "weights rounded to int8 on their way are not those that a checkpoint holds, and its "
    "kernels are compiled at the start; spread them over fewer ranks with zero_hpz_partition_size instead",
    "zero_quantized_nontrainable_weights": "weights rounded to int8 are not those that a checkpoint holds",
    "zero_quantized_gradients": "gradients rounded to int4 on their way are not those of one process, and its kernels "
    "are compiled at the start; leave it out",
    "mics_shard_size": "DeepSpeed has removed MiCS; zero_hpz_partition_size keeps a copy of the weights among so many "
    "ranks",
    "mics_hierarchical_params_gather": "DeepSpeed has removed MiCS; leave it out",
}
"""Of `zero_optimization` and of the stage's section: why not, and what instead."""

SCHEDULER = "the schedule is the stage's: optimizer.schedule, optimizer.warmup_steps and optimizer.min_lr; leave it out"

KNOWN = {*OURS, *FIXED, *IGNORED, "train_batch_size", "optimizer.params.betas"}


def is_section(key: str) -> bool:
    """Whether the JSON has keys below this one that are known."""
    return any(known.startswith(f"{key}.") for known in KNOWN)

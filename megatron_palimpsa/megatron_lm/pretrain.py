"""A whole training script around Megatron-LM's `pretrain`, in the manner of its pretrain_hybrid.py, which no wheel has.

    torchrun --nproc-per-node 2 -m megatron_palimpsa.megatron_lm.pretrain --mock-data ...

docs/megatron_lm.md has a complete command. Trains on Megatron's indexed data sets (`--data-path`; `prep` writes such)
or on mock data. With `--dataloader-inter-document-masking` documents do not see each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor, nn

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.megatron_lm import add_palimpsa_args, prepare
from megatron_palimpsa.megatron_lm.arguments import model_config
from megatron_palimpsa.model.build import packed_sequence
from megatron_palimpsa.model.weights import initialize_weights

Losses = tuple[Tensor, Tensor, dict[str, Tensor]]


def datasets(samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Training, validation and test sets; built on the ranks that read batches, None elsewhere."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, partial(_reads_batches, vp_stage=vp_stage), config).build()


# Megatron then asks every rank, not the first of each tensor-parallel group alone.
datasets.is_distributed = True  # type: ignore[attr-defined]


def _reads_batches(vp_stage: int | None = None) -> bool:
    with_documents = get_args().dataloader_inter_document_masking
    needed = with_documents or is_first_or_last_pipeline_stage(vp_stage)
    return needed and mpu.get_tensor_model_parallel_rank() == 0


def forward_step(batches: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through this rank's part of the model; Megatron's forward_step_func."""
    batch = _batch_of_this_rank(batches)
    documents = None
    if batch.get("cu_seqlens") is not None:
        offsets = batch["cu_seqlens"][0]
        update_seqlen_stats_from_cu_seqlens(offsets)
        documents = packed_sequence(offsets)
    output = model(batch.get("tokens"), None, None, labels=batch.get("labels"), packed_seq_params=documents)
    # Nothing on stages before the last, where Megatron does not call the function.
    loss_mask: Any = batch.get("loss_mask")
    return output, partial(sum_losses, loss_mask)


def _batch_of_this_rank(batches: Iterator[dict[str, Tensor]]) -> dict[str, Any]:
    """What this pipeline stage needs of a batch, on its device."""
    args = get_args()
    with_documents = args.dataloader_inter_document_masking
    if not with_documents and not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return {}
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {name: value.cuda(non_blocking=True) for name, value in next(batches).items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=with_documents,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return flatten_batch_for_packed_sequences(batch)


def sum_losses(loss_mask: Tensor, losses: Tensor) -> Losses:
    """Megatron's loss function: (sum to differentiate, tokens with a loss, what to report)."""
    loss_mask = loss_mask.view(-1).float()
    loss = (losses.float().view(-1) * loss_mask).sum()
    tokens = loss_mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens])}


def main() -> None:
    """Exit code 2 and one message where the arguments do not go together."""
    try:
        require_gpu()
        args = parse_and_validate_args(extra_args_provider=add_palimpsa_args)
        prepare(args)
        if args.dataloader_inter_document_masking and args.pipeline_model_parallel_size > 1 < args.micro_batch_size:
            raise ConfigError("--dataloader-inter-document-masking with pipeline stages needs --micro-batch-size 1")
    except ConfigError as error:
        sys.exit(_refuse(error))
    model = hybrid_config_from_args(args)
    model.pre_wrap_hooks.append(draw_weights)
    pretrain(pretrain_cfg_container_from_args(args, model), datasets, ModelType.encoder_or_decoder, forward_step)


def require_gpu() -> None:
    """Megatron ends with a traceback where there is none.

    Raises:
        ConfigError: says what runs without.
    """
    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        raise ConfigError("Megatron-LM's loop needs a GPU; without one `megatron-palimpsa train` trains the same model")


def draw_weights(chunks: list[HybridModel]) -> list[HybridModel]:
    """All weights as our trainer draws them from the same seed: the stack's are, embedding and output join them."""
    args = get_args()
    for chunk in chunks:
        initialize_weights(chunk, model_config(args), args.seed)
    return chunks


def _refuse(error: ConfigError) -> int:
    print(f"megatron_palimpsa: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()

"""A language model of Palimpsa, Mamba2, attention and MLP layers, for transformers."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.versions import require_version

from .configuration_palimpsa import PalimpsaHybridConfig
from .layers_palimpsa import PalimpsaLayer
from .mixers_palimpsa import FP32_PARAMETERS, PalimpsaMixer
from .norms_palimpsa import PalimpsaRMSNorm

require_version("transformers>=5.24", "Its caches of states were another before.")


class PalimpsaHybridPreTrainedModel(PreTrainedModel):
    config_class = PalimpsaHybridConfig
    base_model_prefix = "backbone"
    _no_split_modules = ("PalimpsaLayer",)
    _keep_in_fp32_modules_strict = FP32_PARAMETERS
    _supports_sdpa = True
    # What was written to a state cannot be taken out again.
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PalimpsaMixer):
            # As training starts: step sizes of 1e-3 to 1e-1, A of 1 to 16, b_scale 1, prior 1.
            step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            init.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1, 16).log())
            init.ones_(module.D)
            if module.importance:
                init.ones_(module.b_scale)
                init.zeros_(module.prior_log)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Change the number of ids; as before, the embedding has rows up to `pad_vocab_size_multiple` behind them.

        Args:
            new_num_tokens: how many ids there are then; None: as many as now.
            pad_to_multiple_of: round that up.
            mean_resizing: new rows look like the old ones' average, not like a new model's.
        """
        multiple = pad_to_multiple_of or 1
        vocab_size = -(-(new_num_tokens or self.config.vocab_size) // multiple) * multiple
        embeddings = super().resize_token_embeddings(vocab_size, self.config.pad_vocab_size_multiple, mean_resizing)
        self.config.vocab_size = vocab_size
        return embeddings


class PalimpsaHybridModel(PalimpsaHybridPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: PalimpsaHybridConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PalimpsaLayer(config, index) for index in range(len(config.pattern)))
        self.norm_f = PalimpsaRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        self.embeddings = embeddings

    @deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")
    @deprecate_kwarg("cache_params", version="5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states behind the final norm.

        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, hidden size]; they continue what `cache` has seen.
            attention_mask: [B, L] over all tokens so far, 0 on padding, which belongs before a row's tokens.
            cache: what an earlier call returned.
            use_cache: keep the states; None is the config's setting, or False in training.
            output_hidden_states: give the embeddings and every layer's output too, the last behind the final norm.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        padding = self._padding(attention_mask, hidden.shape[1], cache)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        streams = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, cache=cache, padding=padding)
            if output_hidden_states:
                streams.append(hidden)
        streams[-1] = self.norm_f(hidden)
        output = BaseModelOutputWithPast(
            last_hidden_state=streams[-1],
            cache=cache if use_cache else None,
            hidden_states=tuple(streams) if output_hidden_states else None,
        )
        return output if return_dict or return_dict is None else output.to_tuple()

    def _padding(self, attention_mask: Tensor | None, tokens: int, cache: Cache | None) -> Tensor | None:
        """[B, L], True where a token is none; None where all are some."""
        if attention_mask is None:
            return None
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            form = (
                f"{attention_mask.dim()} dimensions"
                if isinstance(attention_mask, Tensor)
                else "masks of a static cache"
            )
            raise ValueError(f"attention_mask has {form}: only [B, L], 0 on padding, is taken")
        seen = 0
        if cache is not None and "*" in self.config.pattern:
            seen = cache.get_seq_length(self.config.pattern.index("*"))
        if attention_mask.shape[1] < seen + tokens:
            raise ValueError(f"attention_mask is for {attention_mask.shape[1]} tokens and not for all {seen + tokens}")
        padding = attention_mask == 0
        return padding if padding.any() else None


class PalimpsaHybridForCausalLM(PalimpsaHybridPreTrainedModel, GenerationMixin):
    """Logits of the `vocab_size` ids; rows of the embedding behind them have none and are never sampled."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: PalimpsaHybridConfig) -> None:
        super().__init__(config)
        self.backbone = PalimpsaHybridModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")
    @deprecate_kwarg("cache_params", version="5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Logits [B, T, vocab_size] in fp32, and the loss of `labels` [B, T], which are shifted here.

        The other arguments are `PalimpsaHybridModel`'s; `logits_to_keep`: of the last so many tokens only, 0: of all.
        """
        output = self.backbone(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        places = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, places]
        logits = self.lm_head(hidden)[..., : self.config.vocab_size].float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=output.cache, hidden_states=output.hidden_states
        )
        return result if return_dict or return_dict is None else result.to_tuple()

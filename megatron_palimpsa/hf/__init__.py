"""The model for transformers: `import megatron_palimpsa.hf` makes AutoModelForCausalLM know it, for exported folders.

The modules here need torch and transformers alone. `export` copies them into a model's folder, where transformers finds
them with `trust_remote_code=True` and nothing of this project has to be installed; they therefore import each other
relatively and nothing else of `megatron_palimpsa`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from megatron_palimpsa.hf.configuration_palimpsa import PalimpsaHybridConfig
from megatron_palimpsa.hf.modeling_palimpsa import PalimpsaHybridForCausalLM, PalimpsaHybridModel

__all__ = ["PalimpsaHybridConfig", "PalimpsaHybridForCausalLM", "PalimpsaHybridModel"]

AutoConfig.register(PalimpsaHybridConfig.model_type, PalimpsaHybridConfig, exist_ok=True)
AutoModelForCausalLM.register(PalimpsaHybridConfig, PalimpsaHybridForCausalLM, exist_ok=True)

"""What a layer keeps for its backward pass on a GPU, and what that pass takes at its peak, in bytes.

Counted tensor by tensor from the layers and their autograd functions (`model/mixer*.py`, `palimpsa_kernels/triton`),
with the tiles that those take on Hopper for d_state a multiple of 64; `tests/training/test_memory.py` compares with
the tensors that they make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_palimpsa.config import IMPORTANCE_SYMBOLS, MIXER_SYMBOLS, StageConfig

# Of palimpsa_kernels.triton: tokens of a chunk, most heads' sums in flight, the tile of the elementwise backward pass,
# the bytes of its parts of dq and dk at a time, and its programs on a GPU of 132 multiprocessors.
_SSD_CHUNK, _SSD_SPLITS = 64, 8
_CHUNK, _SPLITS = 128, 4
_TILE_K, _TILE_V = 64, 16
_PARTS_BYTES = 2**30
_PROGRAMS = 8 * 132
_DENSE_SLOTS = 8  # of a program's scratch, beside one for each span that a chunk may have

_DOCUMENTS = 3  # borders inside of a sequence, about: each makes the chunks one more


@dataclass(frozen=True)
class Shapes:
    """A rank's share of one microbatch and of the model's width."""

    tokens: int
    documents: int
    stream: int
    """Channels of the residual stream that a rank holds for each token, a tp-th under sequence parallelism."""
    hidden: int
    inner: int
    heads: int
    keys: int
    """Groups of B and C times d_state."""
    d_state: int
    headdim: int
    beta_rank: int
    attention: int
    """Query channels."""
    attention_heads: int
    attention_keys: int
    rotates: bool
    """Whether queries and keys get a rotary embedding."""
    ffn: int
    size: int
    """Bytes of a number in the model's dtype."""
    residual_size: int
    """Bytes of a number of the residual stream."""

    @property
    def groups(self) -> int:
        return self.keys // self.d_state


def shapes_of(config: StageConfig) -> Shapes:
    model, parallel = config.model, config.parallel
    tp = parallel.tp
    heads_of_attention = model.num_attention_heads or 1
    groups_of_attention = model.num_query_groups or heads_of_attention
    size = 4 if config.train.precision == "fp32" else 2
    heads = model.nheads // tp
    groups = max(1, heads * model.ngroups // model.nheads)
    return Shapes(
        tokens=config.train.micro_batch_size * model.seq_length // parallel.cp,
        documents=math.ceil(config.train.micro_batch_size * _DOCUMENTS / parallel.cp),
        stream=model.hidden_size // (tp if parallel.sequence_parallel else 1),
        hidden=model.hidden_size,
        inner=model.d_inner // tp,
        heads=heads,
        keys=groups * model.d_state,
        d_state=model.d_state,
        headdim=model.headdim,
        beta_rank=model.beta_rank,
        attention=model.hidden_size // tp,
        attention_heads=heads_of_attention // tp,
        attention_keys=model.hidden_size * groups_of_attention // heads_of_attention // tp,
        rotates=model.rope_theta is not None,
        ffn=(model.ffn_hidden_size or 0) // tp,
        size=size,
        residual_size=4 if model.fp32_residual else size,
    )


def kept(shapes: Shapes, symbol: str, recompute: str) -> int:
    """Bytes that one layer holds between its forward and its backward pass; `recompute` as in the configuration."""
    if recompute == "full":
        return _layer_input(shapes)
    return _everything(shapes, symbol) - (_cheap(shapes, symbol) if recompute == "selective" else 0)


def formed_again(shapes: Shapes, symbol: str, recompute: str) -> int:
    """Bytes that recomputation adds to `kept` until the peak of the layer's backward pass."""
    if recompute == "full":
        # The layer's output comes back too.
        return _everything(shapes, symbol) + _layer_input(shapes)
    if recompute == "none":
        return 0
    # The norm's output of a mixer is formed last, behind the scan.
    late = shapes.tokens * shapes.size * shapes.hidden if symbol in MIXER_SYMBOLS else 0
    return _cheap(shapes, symbol) - late


def _layer_input(n: Shapes) -> int:
    return n.tokens * n.residual_size * n.stream


def _cheap(n: Shapes, symbol: str) -> int:
    """What selective recomputation drops: the norms' and convolutions' outputs, beta before its sigmoid."""
    if symbol in "*-":
        return n.tokens * n.size * n.stream
    if symbol in "QLG":
        return n.tokens * n.size * (n.hidden + _dropped_by_d(n, symbol))
    return n.tokens * n.size * (n.hidden + 2 * n.inner + 2 * n.keys + (n.inner if symbol == "P" else 0))


def _everything(shapes: Shapes, symbol: str) -> int:
    """Bytes that a layer keeps without recomputation."""
    n = shapes
    if symbol in "*-":
        # The norm's input, which is the residual stream itself, its root mean square and its output.
        around = n.residual_size * n.stream + 4 + n.size * n.stream
        if symbol == "-":
            # Gate beside up projection, the activated gate, the up projection plus Megatron's offset, their product.
            return n.tokens * (around + n.size * 5 * n.ffn)
        # Queries, keys and values together, queries once more, the output by document and whole, log-sum-exp.
        inside = n.size * (4 * n.attention + 2 * n.attention_keys) + 4 * n.attention_heads
        if n.rotates:
            # The keys once more, and in fp32 the cosines and sines of a head's pairs of channels.
            inside += n.size * n.attention_keys + 4 * n.attention // n.attention_heads
        return n.tokens * (around + inside)
    # The norm's input and its root mean square; its output, gathered where the stream is split.
    around = n.size * (n.stream + n.hidden) + 4
    if symbol in "QLG":
        return n.tokens * around + _inside_d(n, symbol)
    # z, x before and behind the convolution, y, the gated norm's output and its root mean square.
    inside = n.size * 5 * n.inner + 4
    small = 2 * n.keys + n.heads + (n.beta_rank if symbol == "P" else 0)
    # The projections before and B and C behind the convolution; log_alpha.
    inside += n.size * (small + 2 * n.keys) + 4 * n.heads
    if symbol == "P":
        inside += n.size * n.inner  # beta before its sigmoid
    return n.tokens * (around + inside) + _states(n, symbol) + n.size * small * n.hidden


def _inside_d(n: Shapes, symbol: str) -> int:
    """What Palimpsa-D keeps inside. G: about as L."""
    keys = n.heads * n.d_state
    # The gate before and behind its SiLU, v before and behind the convolution, y, its norm, their product.
    inside = n.size * 7 * n.inner
    small = 2 * keys + 2 * n.heads
    if symbol == "Q":
        inside += n.size * n.inner  # beta before its sigmoid
        small += n.beta_rank
    # Keys and queries before and behind the convolution, and of unit length; their lengths, log_alpha, y's mean square.
    inside += n.size * (small + 4 * keys) + 4 * 4 * n.heads
    return n.tokens * inside + _states(replace(n, keys=keys), symbol) + n.size * small * n.hidden


def _dropped_by_d(n: Shapes, symbol: str) -> int:
    """Channels of a token: the norm, the gate, their product, v, keys and queries twice, beta before its sigmoid."""
    return 4 * n.inner + 4 * n.heads * n.d_state + (n.inner if symbol == "Q" else 0)


def _states(n: Shapes, symbol: str) -> int:
    """States at the chunks' ends: both in fp32 with importance, in the inputs' dtype without."""
    if symbol in IMPORTANCE_SYMBOLS:
        return 8 * _chunks(n, _chunk_size(n)) * n.inner * n.d_state
    return n.size * _chunks(n, _SSD_CHUNK) * n.inner * n.d_state


def _chunks(n: Shapes, size: int) -> int:
    """Each document's last chunk is a short one."""
    return math.ceil(n.tokens / size) + n.documents


def _chunk_size(n: Shapes) -> int:
    wanted = 2 ** (n.tokens * n.heads // 8192).bit_length() // 2
    return min(_CHUNK, max(64, wanted))


def backward(shapes: Shapes, symbol: str) -> int:
    """Bytes at the peak of a layer's backward pass beyond `kept` and `formed_again`.

    The peak of a mixer is inside of its scan: z, y and what the output projection took are freed by then.
    """
    n = shapes
    around = n.residual_size * n.stream
    if symbol == "*":
        return n.tokens * (around + n.size * 4 * n.attention)
    if symbol == "-":
        return n.tokens * (around + n.size * 4 * n.ffn)
    if symbol in "QLG":
        return n.tokens * around + _backward_d(replace(n, keys=n.heads * n.d_state), symbol)
    inside = n.tokens * (around - n.size * 3 * n.inner)
    return inside + (_palimpsa_backward(n) if symbol == "P" else _ssd_backward(n))


def output_projection(shapes: Shapes, symbol: str) -> int:
    """Parameters of a layer's last projection, whose gradient has come by the peak of the layer's backward pass."""
    channels = {"*": shapes.attention, "-": shapes.ffn}.get(symbol, shapes.inner)
    return channels * shapes.hidden


def _backward_d(n: Shapes, symbol: str) -> int:
    """In the scan: the gate, its SiLU, y, its norm and their product are freed."""
    scan = _palimpsa_backward(n) if symbol == "Q" else _ssd_backward(n)
    return scan - n.tokens * n.inner * 5 * n.size


def _ssd_backward(n: Shapes) -> int:
    splits = min(_SSD_SPLITS, n.heads // n.groups)
    chunks = _chunks(n, _SSD_CHUNK)
    adjoints = 4 * chunks * n.inner * n.d_state
    scores = 4 * chunks * n.groups * splits * _SSD_CHUNK**2
    # dq and dk in parts and whole; the gradients to z, y and v, v itself; seven numbers a head.
    each = 4 * 2 * splits * n.keys + n.size * (2 * n.keys + 4 * n.inner) + 4 * 7 * n.heads
    return adjoints + scores + n.tokens * each


def _palimpsa_backward(n: Shapes) -> int:
    splits = min(_SPLITS, n.heads // n.groups)
    parts_k, parts_v = math.ceil(n.d_state / _TILE_K), math.ceil(n.headdim / _TILE_V)
    chunk = _chunk_size(n)
    chunks = _chunks(n, chunk)
    adjoints = 8 * chunks * n.inner * n.d_state
    row_bytes = 2 * chunk * n.heads * parts_v * n.d_state * n.size
    at_once = math.ceil(chunks / max(1, round(chunks * row_bytes / _PARTS_BYTES)))
    programs = min(at_once * n.heads * parts_k * parts_v, _PROGRAMS)
    scratch = 4 * programs * (_DENSE_SLOTS + chunk // 4) * 2 * _TILE_K * _TILE_V
    # The gradients to z and y, v and beta; dv and dbeta in parts; dq; dk in parts and as sums; q beside k in fp32.
    each = n.size * (4 * n.inner + 2 * parts_k * n.inner + n.keys) + 4 * (1 + 2 * splits) * n.keys + 8 * n.keys
    # log_alpha and its sums, the spans, and its gradient in parts.
    each += n.heads * (4 * 4 + 1) + 4 * n.heads * parts_k * parts_v
    return adjoints + at_once * row_bytes + scratch + n.tokens * each

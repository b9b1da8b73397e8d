"""The elementwise part of Palimpsa's backward pass, parallel over chunks.

A program takes one piece of work after the other: it walks one chunk of one head backwards over a [BLOCK_K, BLOCK_V]
tile of the state. With zero adjoint behind the chunk it accumulates the adjoints of the two states,

    w_t = dy_t q_t / I_t,   dM += w_t,   dIbar -= w_t M_t / I_t,

and reads every gradient off them. Inside of a span (see `decay`) the states run backwards by subtraction; the state
before it is the one at the chunk's boundary or a waypoint in the program's own scratch. Dense chunks, which a launch of
its own takes, have waypoints before each DENSE_BLOCK tokens, whose states are computed anew, every second one kept.

With bf16 inputs tensor cores form the sums over V, of terms cut to tf32, and the gradient to log_alpha, in its direct
form at each span's start, comes inside of a span from what a token adds,

    <dM_t, M_t-1> + <dI_t, I_t-1> = <dM_t+1, M_t> + <dI_t+1, I_t> + prior sum(q share) - v . dv - beta . dbeta,

whose cancelling stays small where the decay does. Other inputs take fp32 sums and the direct form at every token.
"""

import triton
import triton.language as tl

from palimpsa_kernels.triton.adjoint_token import column_pointers, product_sum, step_back, store_columns, store_rows
from palimpsa_kernels.triton.primitives import anew, chunk_bounds, chunk_document, row_copies, row_lanes, thread_sums
from palimpsa_kernels.triton.tiles import load_boundary, load_columns, load_query_key, tile_offsets
from palimpsa_kernels.triton.waypoints import fill_waypoints


@triton.jit(do_not_specialize=["work", "first_chunk"])
def adjoint_kernel(
    qk, k, v, beta, dy, log_alpha, inv_a, rescale, starts, counts, any_dense, table, states, initial, prior,
    row_parts, dv_parts, dbeta_parts, dlog_alpha_parts, dprior_parts, adjoints, scratch,
    counter, work, first_chunk, size, slots, span_slots, H, heads_per_group,
    stride_qk, stride_k, stride_v, stride_beta, stride_dy,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PRIOR_GRADIENT: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, WALK: tl.constexpr,
    DENSE: tl.constexpr, DENSE_BLOCK: tl.constexpr,
):  # fmt: skip
    PARTS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PARTS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    PARTS: tl.constexpr = PARTS_K * PARTS_V
    PAIRS: tl.constexpr = not EXACT
    TILE: tl.constexpr = BLOCK_K * BLOCK_V
    LANES: tl.constexpr = row_lanes(BLOCK_K, BLOCK_V)
    COPIES: tl.constexpr = row_copies(BLOCK_V)
    ROWS: tl.constexpr = BLOCK_K // LANES
    KEYS: tl.constexpr = (K + ROWS - 1) // ROWS * ROWS
    # The scratch: states before the pairs of tokens of a dense block, then those before each block. Offsets are those
    # of `tile_order`, the lane's apart from its rows', so that one address serves all rows of a thread.
    row = tl.arange(0, BLOCK_K)[:, None]
    own_tile = row % LANES * (ROWS * BLOCK_V) + tl.arange(0, BLOCK_V)[None, :] + row // LANES * BLOCK_V
    own = scratch + tl.program_id(0).to(tl.int64) * slots * 2 * TILE
    waypoints = own + DENSE_BLOCK // 2 * 2 * TILE
    own_waypoints = waypoints + own_tile
    own += own_tile
    copy = tl.arange(0, COPIES)[:, None, None]
    within = tl.arange(0, LANES)[None, :, None] * 2 * ROWS + copy * ROWS + tl.arange(0, ROWS)[None, None, :]
    state_size = H * K * V
    if DENSE:
        work *= tl.load(any_dense)
    item = tl.atomic_add(counter, 1)
    while item < work:
        part = item % PARTS
        head = (item // PARTS) % H
        chunk = (first_chunk + item // (PARTS * H)).to(tl.int64)
        group = head // heads_per_group
        natural_k = (part // PARTS_V) * BLOCK_K + tl.arange(0, BLOCK_K)
        first_v = (part % PARTS_V) * BLOCK_V
        inside_v = first_v + tl.arange(0, BLOCK_V) < V
        start, end = chunk_bounds(table, chunk)
        document, first = chunk_document(table, chunk)
        length = (end - start).to(tl.int32)
        spans = tl.load(counts + chunk * H + head)
        if (length > 0) & ((spans == 0) == DENSE):
            boundary = states + chunk * 2 * state_size
            given = initial + document * 2 * state_size
            tile, inside = tile_offsets(part, head, K, V, BLOCK_K, BLOCK_V)
            prior_h = tl.load(prior + head)

            pair_at = qk + start * stride_qk + group * 2 * K + natural_k[:, None] * 2 + tl.arange(0, 2)[None, :]
            pair_mask = natural_k[:, None] + 0 * tl.arange(0, 2)[None, :] < K
            value_at = v + start * stride_v + head * V + first_v
            beta_at = beta + start * stride_beta + head * V + first_v
            dy_at = dy + start * stride_dy + head * V + first_v
            scalar_at = start * H + head
            row_at = row_parts + (((chunk - first_chunk) * size * H + head) * PARTS_V + part % PARTS_V) * 2 * KEYS
            row_at += (part // PARTS_V) * 2 * BLOCK_K
            left = K - (part // PARTS_V) * BLOCK_K
            row_mask = (within // (2 * ROWS) * ROWS + within % ROWS < left) & (copy < 2)
            columns_at = scalar_at * PARTS_K * V + (part // PARTS_V) * V + first_v
            dv_at = dv_parts + columns_at
            dbeta_at = dbeta_parts + columns_at
            dlog_alpha_at = dlog_alpha_parts + scalar_at * PARTS + part

            span_starts = starts + chunk * span_slots * H + head
            blocks = spans
            weights = inv_a + scalar_at
            if DENSE:
                blocks = (length + DENSE_BLOCK - 1) // DENSE_BLOCK
                weights = log_alpha + scalar_at
            if blocks > 1:
                fill_waypoints(
                    waypoints, boundary, given, state_size, first, k + start * stride_k + group * K, pair_at, value_at,
                    beta_at, weights, rescale + scalar_at, span_starts, blocks, part, head, H,
                    stride_k, stride_qk, stride_v, stride_beta, pair_mask, inside_v, K, V, BLOCK_K, BLOCK_V, WALK,
                    DENSE, DENSE_BLOCK, HAS_INITIAL, EXACT, EVEN,
                )  # fmt: skip
                tl.debug_barrier()

            if not EXACT:
                dv_at = column_pointers(dv_at, dbeta_at, BLOCK_V)
            d_mean = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            d_importance = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            d_prior = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            if DENSE:
                for n in range(0, blocks):
                    place = blocks - 1 - n
                    block_start = place * DENSE_BLOCK
                    block_end = tl.minimum(block_start + DENSE_BLOCK, length)
                    if place == 0:
                        tile, inside = tile_offsets(anew(part), head, K, V, BLOCK_K, BLOCK_V)
                        mean, importance = load_boundary(
                            boundary + tile, given + tile, state_size, inside, first, HAS_INITIAL
                        )
                    else:
                        mean = tl.load(own_waypoints + place * 2 * TILE)
                        importance = tl.load(own_waypoints + place * 2 * TILE + TILE)
                    for pair in tl.range(0, (block_end - block_start + 1) // 2, num_stages=1):
                        for second in tl.static_range(2):
                            # Behind a last odd token the states are not used.
                            i = tl.minimum(block_start + 2 * pair + second, block_end - 1)
                            alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                            _, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                            value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                            precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                            mean *= alpha
                            importance *= alpha
                            if second == 0:
                                tl.store(own + pair * 2 * TILE, mean)
                                tl.store(own + pair * 2 * TILE + TILE, importance)
                            mean += key[:, None] * value[None, :]
                            importance += (key * key)[:, None] * precision[None, :]
                    for step in tl.range(0, block_end - block_start, num_stages=STAGES):
                        i = block_end - 1 - step
                        slot = own + (i - block_start) // 2 * 2 * TILE
                        mean = tl.load(slot)
                        importance = tl.load(slot + TILE)
                        before = tl.maximum(i - 1, block_start)
                        _, key_before = load_query_key(pair_at + before * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                        value_before = load_columns(value_at + before * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                        precision_before = load_columns(beta_at + before * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                        alpha = tl.exp(tl.load(log_alpha + scalar_at + i * H))
                        query, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                        value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                        precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                        d_out = load_columns(dy_at + i * stride_dy, inside_v, BLOCK_V, EVEN, PAIRS)
                        # The decayed state before a pair's first token; before the second one, a step later.
                        if (i - block_start) % 2 == 1:
                            mean = (mean + key_before[:, None] * value_before[None, :]) * alpha
                            importance += (key_before * key_before)[:, None] * precision_before[None, :]
                            importance *= alpha
                        d_mean, d_importance, dq, dk, dv, dbeta, share = step_back(
                            mean + key[:, None] * value[None, :],
                            importance + (key * key)[:, None] * precision[None, :],
                            prior_h, query, key, value, precision, d_out, d_mean, d_importance, BLOCK_K, BLOCK_V, EXACT,
                        )  # fmt: skip
                        if PRIOR_GRADIENT:
                            d_prior += query[:, None] * share
                        d_log = product_sum(d_mean, mean, d_importance, importance, BLOCK_K, BLOCK_V)
                        store_rows(row_at + i * H * PARTS_V * 2 * KEYS + within, dq, dk, row_mask, BLOCK_K, BLOCK_V)
                        store_columns(dv_at, dbeta_at, i * H * PARTS_K * V, dv, dbeta, 1.0, V - first_v, BLOCK_V, EXACT)
                        tl.store(dlog_alpha_at + i * H * PARTS, d_log)
                        d_mean *= alpha
                        d_importance *= alpha
            else:
                inverse = tl.load(inv_a + scalar_at + (length - 1) * H)
                mean = tl.load(boundary + tile, mask=inside, other=0.0) * inverse
                importance = tl.load(boundary + tile + state_size, mask=inside, other=0.0) * inverse
                # <dM, M> + <dIbar, Ibar> between two tokens, the same in every frame; 0 behind the chunk.
                d_log = 0.0
                span_end = length
                for n in range(0, spans):
                    place = spans - 1 - n
                    span_start = tl.load(span_starts + place * H)
                    for step in tl.range(0, span_end - span_start, num_stages=STAGES):
                        i = span_end - 1 - step
                        inverse = tl.load(inv_a + scalar_at + i * H)
                        query, key = load_query_key(pair_at + i * stride_qk, pair_mask, BLOCK_K, BLOCK_V, EVEN)
                        value = load_columns(value_at + i * stride_v, inside_v, BLOCK_V, EVEN, PAIRS)
                        precision = load_columns(beta_at + i * stride_beta, inside_v, BLOCK_V, EVEN, PAIRS)
                        d_out = load_columns(dy_at + i * stride_dy, inside_v, BLOCK_V, EVEN, PAIRS)
                        d_mean, d_importance, dq, dk, dv, dbeta, share = step_back(
                            mean, importance, prior_h * inverse, query, key, value, precision, d_out,
                            d_mean, d_importance, BLOCK_K, BLOCK_V, EXACT,
                        )  # fmt: skip
                        if PRIOR_GRADIENT:
                            d_prior += (query * inverse)[:, None] * share
                        value *= inverse
                        precision *= inverse
                        mean -= key[:, None] * value[None, :]
                        importance -= (key * key)[:, None] * precision[None, :]
                        if EXACT:
                            d_log = product_sum(d_mean, mean, d_importance, importance, BLOCK_K, BLOCK_V)
                        else:
                            ratio = thread_sums(share * query[:, None], BLOCK_K, BLOCK_V)
                            d_log += tl.sum(
                                (prior_h * inverse) * ratio - dv * value[None, :] - dbeta * precision[None, :]
                            )
                        store_rows(
                            row_at + i * H * PARTS_V * 2 * KEYS + within, dq, dk * inverse, row_mask, BLOCK_K, BLOCK_V
                        )
                        store_columns(
                            dv_at, dbeta_at, i * H * PARTS_K * V, dv, dbeta, inverse, V - first_v, BLOCK_V, EXACT
                        )
                        tl.store(dlog_alpha_at + i * H * PARTS, d_log)
                    # Across the span's start into the frame of the span before, whose state is exact again.
                    if place == 0:
                        tile, inside = tile_offsets(anew(part), head, K, V, BLOCK_K, BLOCK_V)
                        mean, importance = load_boundary(
                            boundary + tile, given + tile, state_size, inside, first, HAS_INITIAL
                        )
                    else:
                        mean = tl.load(own_waypoints + place * 2 * TILE)
                        importance = tl.load(own_waypoints + place * 2 * TILE + TILE)
                    factor = tl.load(rescale + scalar_at + span_start * H)
                    d_mean *= factor
                    d_importance *= factor
                    d_log = product_sum(d_mean, mean, d_importance, importance, BLOCK_K, BLOCK_V)
                    tl.store(dlog_alpha_at + span_start * H * PARTS, d_log)
                    span_end = span_start
            tile, inside = tile_offsets(anew(part), head, K, V, BLOCK_K, BLOCK_V)
            tl.store(adjoints + chunk * 2 * state_size + tile, d_mean, mask=inside)
            tl.store(adjoints + (chunk * 2 + 1) * state_size + tile, d_importance, mask=inside)
            if PRIOR_GRADIENT:
                tl.store(dprior_parts + (chunk * H + head) * PARTS + part, -tl.sum(d_prior))
        item = tl.atomic_add(counter, 1)

"""The exported model in transformers: cached states, padded batches, dtypes, kernels."""

from __future__ import annotations

import itertools

import palimpsa_kernels
import pytest
import torch
from helpers.models import randomise
from helpers.reference_model import relative_error
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_palimpsa.hf import PalimpsaHybridConfig, PalimpsaHybridForCausalLM, kernels_palimpsa
from megatron_palimpsa.hf.mixers_palimpsa import FP32_PARAMETERS

GEOMETRY = {
    "pattern": "MP*-QL",
    "vocab_size": 61,
    "hidden_size": 32,
    "state_size": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "norm_groups": 1,
    "beta_rank": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rotary_base": 100.0,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def model() -> PalimpsaHybridForCausalLM:
    torch.manual_seed(0)
    model = PalimpsaHybridForCausalLM(PalimpsaHybridConfig(**GEOMETRY)).eval()
    randomise(model, 0.3)
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 61, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pattern", ["MP*-QL", "PM", "P-", "*-", "Q-", "L"])
def test_cached_tokens_are_the_uncached_ones(pattern: str) -> None:
    torch.manual_seed(1)
    model = PalimpsaHybridForCausalLM(PalimpsaHybridConfig(**{**GEOMETRY, "pattern": pattern})).eval()
    randomise(model, 0.3)
    ids = torch.cat([prompt(9), prompt(9, 1)])
    cached = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=24, do_sample=False, use_cache=False))
    assert len(set(cached[0, 9:].tolist())) > 5


def test_a_batch_padded_on_the_left_is_each_row_by_itself(model: PalimpsaHybridForCausalLM) -> None:
    rows = [prompt(length, length) for length in (1, 2, 7, 40)]
    ids = torch.cat([torch.nn.functional.pad(row, (40 - row.shape[1], 0), value=5) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (40 - row.shape[1], 0)) for row in rows])
    together = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for row, tokens in zip(rows, together, strict=True):
        alone = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=20, do_sample=False)
        assert torch.equal(tokens[40:], alone[0, row.shape[1] :])
    with torch.no_grad():
        padded = model(ids, attention_mask=mask)
        for index, row in enumerate(rows):
            alone = model(row)
            torch.testing.assert_close(padded.logits[index, 40 - row.shape[1] :], alone.logits[0], atol=1e-5, rtol=1e-5)
            for layer, states in ((0, 1), (1, 2), (4, 2), (5, 1)):
                ours, theirs = padded.cache.layers[layer], alone.cache.layers[layer]
                torch.testing.assert_close(ours.conv_states[0][index], theirs.conv_states[0][0])
                for state in range(states):
                    torch.testing.assert_close(
                        ours.recurrent_states[state][index], theirs.recurrent_states[state][0], atol=1e-5, rtol=1e-5
                    )


def test_several_tokens_go_on_from_a_cache_padding_among_them(model: PalimpsaHybridForCausalLM) -> None:
    ids, mask = torch.cat([prompt(12, 2), prompt(12, 3)]), torch.ones(2, 12, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        cache, parts = None, []
        for start, end in ((0, 5), (5, 6), (6, 12)):
            output = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache)
            cache = output.cache
            parts.append(output.logits)
    split = torch.cat(parts, dim=1)
    torch.testing.assert_close(split[0], whole[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(split[1, 7:], whole[1, 7:], atol=1e-5, rtol=1e-5)
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 61)
    with pytest.raises(ValueError, match="is for 6 tokens and not for all 18"):
        model(ids[:, :6], attention_mask=mask[:, :6], cache=cache)


@torch.no_grad()
def test_no_state_moves_at_padding_behind_tokens(model: PalimpsaHybridForCausalLM) -> None:
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    cache = model(torch.cat([prompt(5), prompt(5, 1)])).cache
    mixers = [layer for layer, letter in enumerate(GEOMETRY["pattern"]) if letter in "PMQL"]
    before = {
        (layer, index): state.clone()
        for layer in mixers
        for index, state in cache.layers[layer].recurrent_states.items()
        if state is not None
    }
    assert len(before) == 6
    model(torch.cat([prompt(3), prompt(3, 1)]), attention_mask=mask, cache=cache)
    for (layer, index), state in before.items():
        after = cache.layers[layer].recurrent_states[index]
        assert torch.equal(after[1], state[1])
        assert not torch.equal(after[0], state[0])


def test_beams_carry_their_states(model: PalimpsaHybridForCausalLM) -> None:
    settings = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    ids = prompt(6)
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


def test_beams_of_padded_rows_are_those_of_each_row_by_itself(model: PalimpsaHybridForCausalLM) -> None:
    settings = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6, "do_sample": False}
    rows = [prompt(3), prompt(7, 1)]
    ids = torch.cat([torch.nn.functional.pad(row, (7 - row.shape[1], 0), value=5) for row in rows])
    mask = torch.tensor([[0] * 4 + [1] * 3, [1] * 7])
    together = model.generate(ids, attention_mask=mask, **settings)
    for index, row in enumerate(rows):
        alone = model.generate(row, use_cache=False, **settings)
        assert torch.equal(together[2 * index : 2 * index + 2, 7:], alone[:, row.shape[1] :])


@torch.no_grad()
def test_a_cache_by_its_older_names_goes_on_too(model: PalimpsaHybridForCausalLM) -> None:
    ids = prompt(8)
    whole = model(ids).logits
    for module, name in itertools.product((model, model.backbone), ("past_key_values", "cache_params")):
        output = module(ids[:, 5:], **{name: model(ids[:, :5]).cache})
        logits = output.logits if module is model else model.lm_head(output.last_hidden_state)[..., :61]
        torch.testing.assert_close(logits, whole[:, 5:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_hidden_states_begin_with_the_embeddings_and_end_behind_the_last_norm(model: PalimpsaHybridForCausalLM) -> None:
    ids = prompt(5)
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 1 + len("MP*-QL")
    assert torch.equal(states[0], model.get_input_embeddings()(ids))
    assert torch.equal(states[-1], model.backbone(ids).last_hidden_state)
    torch.testing.assert_close(states[1], model.backbone.layers[0](states[0]))


@pytest.mark.parametrize(("arguments", "ids", "rows"), [((70,), 70, 80), ((62,), 62, 64), ((None, 16), 64, 64)])
def test_more_ids_are_saved_and_loaded_again(tmp_path, arguments: tuple[int | None, ...], ids: int, rows: int) -> None:
    model = PalimpsaHybridForCausalLM(PalimpsaHybridConfig(**{**GEOMETRY, "pattern": "P"})).eval()
    randomise(model, 0.3)
    before = model(prompt(5)).logits
    model.resize_token_embeddings(*arguments)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.get_input_embeddings().weight.shape[0] == rows
    logits = loaded(prompt(5)).logits
    assert logits.shape == (1, 5, ids)
    torch.testing.assert_close(logits[..., :61], before)


def test_rows_behind_the_vocabulary_have_no_logits(model: PalimpsaHybridForCausalLM) -> None:
    assert model.get_input_embeddings().weight.shape[0] == 64
    ids = prompt(8)
    output = model(ids, labels=ids)
    assert output.logits.shape == (1, 8, 61)
    wanted = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(output.loss, wanted)


def test_the_kernels_where_they_are_installed_compute_the_same(model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = torch.cat([prompt(40, 2), prompt(40, 3)]), torch.ones(2, 40, dtype=torch.long)
    mask[1, :11] = 0
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    monkeypatch.setattr(kernels_palimpsa, "fast_kernels", lambda x: palimpsa_kernels)
    with torch.no_grad():
        fast = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(fast[0], plain[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast[1, 11:], plain[1, 11:], atol=1e-5, rtol=1e-5)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False), tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_on_a_gpu_compute_the_same(model, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    ids, mask = torch.cat([prompt(40, 2), prompt(40, 3)]).cuda(), torch.ones(2, 40, dtype=torch.long).cuda()
    mask[1, :11] = 0
    on_gpu = PalimpsaHybridForCausalLM(model.config).eval()
    on_gpu.load_state_dict(model.state_dict())
    on_gpu.to("cuda", dtype)
    with torch.no_grad():
        fast = on_gpu(ids, attention_mask=mask).logits
        stepped = on_gpu(ids[:, :39], attention_mask=mask[:, :39])
        stepped = on_gpu(ids[:, 39:], attention_mask=mask, cache=stepped.cache).logits
        monkeypatch.setattr(kernels_palimpsa, "fast_kernels", lambda x: None)
        plain = on_gpu(ids, attention_mask=mask).logits
    bound = 2e-3 if dtype == torch.float32 else 0.05
    for ours, theirs in ((fast[0], plain[0]), (fast[1, 11:], plain[1, 11:]), (stepped[:, 0], plain[:, 39])):
        assert relative_error(ours, theirs) < bound


def test_what_decides_over_states_stays_fp32(model: PalimpsaHybridForCausalLM, tmp_path) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for cast in (loaded, PalimpsaHybridForCausalLM(model.config).to(torch.bfloat16)):
        for name, parameter in cast.named_parameters():
            kept = name.rpartition(".")[2] in FP32_PARAMETERS
            assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    torch.testing.assert_close(
        loaded.state_dict()["backbone.layers.1.mixer.A_log"], model.backbone.layers[1].mixer.A_log
    )
    output = loaded.generate(prompt(5), max_new_tokens=3, return_dict_in_generate=True)
    assert output.cache.layers[1].recurrent_states[1].dtype == torch.float32
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert all(torch.equal(ours, again.state_dict()[name]) for name, ours in model.state_dict().items())


def test_a_new_model_starts_as_training_does() -> None:
    model = AutoModelForCausalLM.from_config(PalimpsaHybridConfig(**GEOMETRY))
    for layer in (1, 4):
        mixer = model.backbone.layers[layer].mixer
        step = torch.nn.functional.softplus(mixer.dt_bias)
        assert ((step > 0.9e-3) & (step < 0.11)).all()
        assert ((mixer.A_log >= 0) & (mixer.A_log <= 2.78)).all()
        for parameter in (mixer.D, mixer.b_scale, mixer.norm.weight):
            assert parameter.eq(1).all()
        assert mixer.prior_log.eq(0).all()


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="no layer is called 'G'"):
        PalimpsaHybridConfig(pattern="PG")
    with pytest.raises(ValueError, match="num_attention_heads is missing"):
        PalimpsaHybridConfig(pattern="P*")
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        PalimpsaHybridConfig(pattern="P-")
    assert AutoConfig.for_model("palimpsa_hybrid", pattern="PM").layer_types == ["linear_attention"] * 2

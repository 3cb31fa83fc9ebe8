"""A new token is written behind the others, and nothing else of the cache moves."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cria_tricks.adapter import chat
from cria_tricks.load import answering, attention
from cria_tricks.load.answering import CACHE, InPlaceLayer, for_answers, in_place
from cria_tricks.techniques.kv_cache import append, groups_as_rows
from tests.techniques.attention import heads, naive_attention
from tests.tolerances import FLASH_DECODING

B, S, D = 2, 45, 16
WIDTHS = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("dtype", FLASH_DECODING, ids=str)
@pytest.mark.parametrize(("h", "k"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_math(masked, h, k, dtype):
    q, key, value, _ = (x.detach() for x in heads(B, h, k, 1, S, D, dtype))
    room = torch.full((B, k, S + 3, D), torch.nan, dtype=dtype)
    assert torch.equal(append(room, 0, key[:, :, :40]), key[:, :, :40])
    assert torch.equal(append(room, 40, key[:, :, 40:]), key)
    mask = hidden = None
    if masked:  # the second row has seven tokens of padding at its left
        mask = torch.ones(B, 1, 1, S, dtype=torch.bool)
        mask[1, ..., :7] = False
        hidden = 7
    module = torch.nn.Module()
    module.num_key_value_groups = h // k
    out_B1HD, _ = attention.sdpa_expanded(module, q, append(room, 40, key[:, :, 40:]), value, mask, is_causal=None)
    expected = naive_attention(q, key, value, False)
    if hidden:
        expected[1] = naive_attention(q[1:], key[1:, :, hidden:], value[1:, :, hidden:], False)[0]
    torch.testing.assert_close(out_B1HD.transpose(1, 2), expected, rtol=0, atol=FLASH_DECODING[dtype])
    assert groups_as_rows(q, k).data_ptr() == q.data_ptr()


def test_more_tokens_than_there_is_room_for_are_refused():
    room = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ValueError, match="has room for 8 tokens, not for 9"):
        append(room, 6, torch.ones(1, 2, 3, 4))
    assert not room.any()


class Moved(TorchDispatchMode):
    """Bytes that operations read and write. A view moves none, and a repeated tensor is read where it is stored."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in ("_unsafe_view", "empty", "new_empty"):
            for x in tree_iter((args, kwargs, out)):
                if isinstance(x, torch.Tensor):
                    self.bytes += min(x.untyped_storage().nbytes(), x.numel() * x.itemsize)
        return out


@pytest.mark.parametrize(
    ("implementation", "ours", "times"),
    [("sdpa", False, 3), ("sdpa", True, 1), ("sdpa_expanded", False, 3), ("sdpa_expanded", True, 1)],
)
def test_mechanism(implementation, ours, times):
    """How often the cache moves for one new token: what grows with the past, over what the cache grows by."""
    config = LlamaConfig(**WIDTHS, **GROUPED)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    found = {}
    for past in (256, 512):
        given = {CACHE: in_place(model, past + 1) if ours else DynamicCache(config=config)}
        with torch.no_grad():
            model(torch.zeros(1, past, dtype=torch.long), **given)
            with Moved() as seen:
                model(torch.zeros(1, 1, dtype=torch.long), **given)
        layers = given[CACHE].layers
        found[past] = seen.bytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        if ours:
            taken = sum(room.untyped_storage().nbytes() for layer in layers for room in layer.rooms)
            assert taken == 2 * 2 * 1 * 2 * (past + 1) * 8 * 4  # blocks, keys and values, B, K, R, D, fp32
    (less, small), (more, large) = found.values()
    assert (more - less) / (large - small) == times


def llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**WIDTHS, **GROUPED, max_position_embeddings=128)).eval()


def sliding():
    """Every second block sees the last 8 tokens only."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**WIDTHS, **GROUPED, head_dim=8, sliding_window=8, layer_types=kinds)
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, sliding])
def test_switch(make, tokenizer, monkeypatch):
    """``cria chat`` and ``cria eval`` answer as with the cache of transformers, and with ours."""
    model = make()
    made = []

    def ours(*arguments):
        made.append(in_place(*arguments))
        return {"use_cache": True, CACHE: made[-1]}

    def theirs(*_):
        return {"use_cache": True}

    prompts = [list(range(3, 3 + length)) for length in (20, 5, 11)]
    monkeypatch.setattr(chat, "write_prompt", lambda *_: _Prompt(input_ids=torch.tensor(prompts[:1])))
    answers = []
    for choose in (ours, theirs):
        monkeypatch.setattr(answering, "for_answers", choose)
        answers.append(
            (chat.answer(model, tokenizer, "", 30), answering.answer_batch(model, tokenizer, prompts, 30)),
        )
    assert answers[0] == answers[1]
    one, several = made
    expected = [InPlaceLayer, InPlaceLayer] if make is llama else [DynamicSlidingWindowLayer, InPlaceLayer]
    for used, rows in ((one, 1), (several, 3)):
        assert [type(layer) for layer in used.layers] == expected
        last = used.layers[-1]
        assert last.rooms[0].shape[:3] == (rows, 2, 50)  # 20 tokens of the longest prompt, 30 new ones
        assert last.keys.data_ptr() == last.rooms[0].data_ptr()


class _Prompt(dict):
    def to(self, device):
        return self


def test_logits_are_those_of_the_usual_cache():
    model = llama()
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for used in (in_place(model, 40), DynamicCache(config=model.config)):
        logits = []
        with torch.no_grad():
            for begin, end in ((0, 30), (30, 31), (31, 35), (35, 36), (36, 40)):
                logits.append(model(ids[:, begin:end], **{CACHE: used}).logits)
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=FLASH_DECODING[torch.float32])


def test_who_keeps_the_cache_of_transformers(tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    prompted = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert for_answers(prompted, 10) == {"use_cache": CACHE == "past_key_values"}
    # Its answer is the one of whole forward passes, each of which begins with the prompt.
    torch.nn.init.normal_(prompted.prompt_encoder["default"].embedding.weight)
    ids = torch.tensor([[3, 4, 5, 9, 2]])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    answer = prompted.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **options, **for_answers(prompted, 13)
    )
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, prompted(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert answer[0, -8:].tolist() == ids[0, -8:].tolist()
    uncached = llama()
    uncached.config.use_cache = False
    assert for_answers(uncached, 10) == {"use_cache": False}
    kinds = {type(layer) for layer in in_place(sliding(), 10).layers}
    assert kinds == {DynamicSlidingWindowLayer, InPlaceLayer}
    assert issubclass(InPlaceLayer, DynamicLayer)

"""The token policy against direct computations on whole, unpadded, uncached rows of real transformers models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgrpo.policies.base import Chunk, Payload, PolicyError, check_policy, concat_payloads
from mmgrpo.policies.tokens import TokenOptions, TokenPolicy, _channel, draw
from mmgrpo.sampling.keys import Keys, make_keys, uniform
from tests.kit.tiny_lm import (
    CHAT_TEMPLATE,
    VOCABULARY,
    ToyTextPipeline,
    build_folder,
    build_model,
    build_policy,
    build_tokenizer,
    even_reward,
    last_reward,
    prompts,
)

FAMILIES = ["llama", "qwen2", "gpt2"]
ITEMS = [{"prompt": p} for p in ("l1:", "l123456:", "l42:")]


def tiny(family: str = "llama", model: dict[str, Any] | None = None, **options: Any) -> TokenPolicy:
    """A policy around a model in memory."""
    made = build_model(family, **(model or {}))
    return TokenPolicy(made, build_tokenizer(), TokenOptions(**({"max_new_tokens": 6} | options)))


def rows_of(items: list[Any], rollouts: int) -> tuple[list[Any], Keys]:
    return [item for item in items for _ in range(rollouts)], make_keys(0, 0, len(items), rollouts)


def everything(payload: Payload) -> Chunk:
    return Chunk(torch.arange(len(payload)), torch.arange(payload.tensors["sample"].shape[1]))


def direct(model: Any, payload: Payload, row: int, temperature: float) -> tuple[Tensor, Tensor]:
    """([n,V] log-probs, [n] tokens) of one row: a single full forward without padding, mask or cache."""
    tensors = payload.tensors
    prompt = tensors["prompt_ids"][row][tensors["prompt_mask"][row]]
    tokens = tensors["sample"][row][tensors["mask"][row]]
    logits = model(input_ids=torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1), tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_and_kl_equal_a_full_forward_of_each_row(family: str) -> None:
    policy = tiny(family, temperature=0.7)
    items, keys = rows_of(ITEMS, 4)
    batch, payload = policy.rollout(items, keys)
    with torch.no_grad():
        for i, p in enumerate(policy.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        out = policy.replay(payload, everything(payload), ("logp", "entropy", "kl_ref"))
        fresh = build_model(family).eval()
        for row in range(len(items)):
            then, tokens = direct(fresh, payload, row, 0.7)
            now, _ = direct(policy.model, payload, row, 0.7)
            n = len(tokens)
            assert torch.allclose(batch.logp[row, :n], then.gather(1, tokens[:, None])[:, 0], atol=1e-5)
            assert torch.allclose(out["logp"][row, :n], now.gather(1, tokens[:, None])[:, 0], atol=1e-5)
            assert torch.allclose(out["entropy"][row, :n], -(now.exp() * now).sum(1), atol=1e-5)
            assert torch.allclose(out["kl_ref"][row, :n], (now.exp() * (now - then)).sum(1), atol=1e-5)
            for value in (batch.logp, *out.values()):
                assert not value[row, n:].any()
    assert float(out["kl_ref"].max()) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_inference_equals_the_generate_of_transformers(family: str) -> None:
    policy = tiny(family, inference="greedy", max_new_tokens=8)
    payload = policy.infer(ITEMS, make_keys(3, 1, len(ITEMS), 1))
    for row, ids in enumerate(policy.encode(ITEMS)):
        prompt = torch.tensor([ids])
        theirs = policy.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, pad_token_id=0
        )[0, len(ids) :]
        ours = payload.tensors["sample"][row][payload.tensors["mask"][row]]
        assert ours.tolist() == theirs.tolist()


def test_padding_ids_and_neighbours_do_not_matter() -> None:
    policy = tiny()
    items, keys = rows_of(ITEMS, 3)
    batch, payload = policy.rollout(items, keys)
    tensors = dict(payload.tensors)
    tensors["prompt_ids"] = tensors["prompt_ids"].where(tensors["prompt_mask"], 7)
    tensors["sample"] = tensors["sample"].where(tensors["mask"], 5)
    with torch.no_grad():
        clean = policy.replay(payload, everything(payload), ("logp",))["logp"]
        dirty = policy.replay(Payload(tensors, items, {}), everything(payload), ("logp",))["logp"]
        assert torch.equal(clean, dirty)
        for row in range(len(items)):
            alone, own = policy.rollout([items[row]], keys.select([row]))
            assert torch.equal(own.tensors["sample"][0], payload.tensors["sample"][row])
            assert torch.allclose(alone.logp[0], batch.logp[row], atol=1e-5)
            wide = concat_payloads([own, payload]).select([0])
            assert torch.allclose(
                policy.replay(wide, everything(wide), ("logp",))["logp"][0], batch.logp[row], atol=1e-5
            )


def test_columns_can_be_picked() -> None:
    policy = tiny()
    items, keys = rows_of(ITEMS, 2)
    _, payload = policy.rollout(items, keys)
    whole = policy.replay(payload, everything(payload), ("logp",))["logp"]
    part = policy.replay(payload, Chunk(torch.tensor([4, 1]), torch.tensor([5, 0, 2])), ("logp",))["logp"]
    assert torch.allclose(part, whole[[4, 1]][:, [5, 0, 2]], atol=1e-5)


def chi_square(counts: Tensor, p: Tensor) -> float:
    """Chi-square over its degrees of freedom, of the cells that expect at least five."""
    expected = counts.sum() * p.double()
    use = expected >= 5
    assert not counts[p == 0].any()
    return float(((counts - expected) ** 2 / expected)[use].sum() / (use.sum() - 1))


def test_drawn_tokens_follow_the_distribution() -> None:
    n = 20_000
    p = torch.tensor([0.0, 0.5, 0.02, 0.0, 0.3, 0.18, 0.0])
    u = uniform(make_keys(1, 0, n, 1).per_rollout("token"), (2,))
    for t in range(2):
        tokens = draw(p.log().expand(n, -1), u[:, t])
        assert chi_square(torch.bincount(tokens, minlength=7).double(), p) < 3
    policy = tiny(max_new_tokens=1, temperature=1.5)
    items = [ITEMS[1]] * 4000
    _, payload = policy.rollout(items, make_keys(2, 0, 1, 4000))
    with torch.no_grad():
        log_p, _ = direct(policy.model, payload, 0, 1.5)
    counts = torch.bincount(payload.tensors["sample"][:, 0], minlength=len(VOCABULARY)).double()
    assert chi_square(counts, log_p[0].exp()) < 2.5


@pytest.mark.parametrize("u", [2.0**-54, 0.5, 1 - 2.0**-53, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    tokens = draw(p.log(), torch.full((3,), u, dtype=torch.float64))
    assert bool((p[torch.arange(3), tokens] > 0).all())
    assert tokens.tolist() == [1 if u < 0.25 else 3, 4, 0]


def test_draw_inverts_the_cumulative_distribution() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    u = torch.tensor([0.05, 0.1, 0.15, 0.301, 0.59, 0.61, 0.99], dtype=torch.float64)
    assert draw(p.log().expand(7, -1), u).tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert draw(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0.5], dtype=torch.float64)).tolist() == [1]
    with pytest.raises(PolicyError, match="not finite.*learning rate"):
        draw(torch.full((1, 4), float("nan")), u[:1])


@pytest.mark.parametrize("name", ["logp", "entropy", "kl_ref"])
def test_gradients_equal_finite_differences(name: str) -> None:
    model = build_model("gpt2", initializer_range=0.2).double()  # the others compute their norms in float32
    policy = TokenPolicy(model, build_tokenizer(), TokenOptions(max_new_tokens=4, temperature=0.8))
    items, keys = rows_of(ITEMS, 1)
    _, payload = policy.rollout(items, keys)
    weights = list(policy.parameters())
    with torch.no_grad():
        for i, p in enumerate(weights):
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))

    def total() -> Tensor:
        value = policy.replay(payload, everything(payload), (name,))[name]
        return (value * torch.arange(1, value.numel() + 1).reshape(value.shape)).sum()

    grads = torch.autograd.grad(total(), weights)
    for p, g in zip(weights, grads, strict=True):
        index = int(g.abs().argmax())
        flat, h = p.data.view(-1), 1e-5
        with torch.no_grad():
            centre = flat[index].clone()
            flat[index] = centre + h
            up = total()
            flat[index] = centre - h
            down = total()
            flat[index] = centre
        assert float((up - down) / (2 * h)) == pytest.approx(float(g.view(-1)[index]), rel=1e-5, abs=1e-7)


def test_impossible_tokens_leave_entropy_and_kl_finite() -> None:
    logits = torch.tensor([[[0.3, -float("inf"), -0.4]]], requires_grad=True)
    log_p = logits.log_softmax(-1)
    other = torch.tensor([[[0.0, -float("inf"), 0.0]]]).log_softmax(-1)
    q = torch.tensor([0.3, -0.4]).log_softmax(0)
    entropy = _channel("entropy", log_p, torch.tensor([[0]]), None)
    kl = _channel("kl_ref", log_p, torch.tensor([[0]]), other)
    assert entropy.item() == pytest.approx(float(-(q.exp() * q).sum()))
    assert kl.item() == pytest.approx(float((q.exp() * (q - math.log(0.5))).sum()))
    (grad,) = torch.autograd.grad(entropy.sum() + kl.sum(), logits)
    assert bool(torch.isfinite(grad).all())


def test_the_mask_ends_with_the_end_token_and_truncation_is_flagged() -> None:
    policy = tiny(max_new_tokens=5)
    items, keys = rows_of(ITEMS, 40)
    batch, payload = policy.rollout(items, keys)
    sample, mask = payload.tensors["sample"], payload.tensors["mask"]
    assert batch.shape == (len(items), 5)
    truncated = batch.keys["truncated"].bool()
    assert 0 < int(truncated.sum()) < len(items)
    for row in range(len(items)):
        n = int(mask[row].sum())
        assert mask[row].tolist() == [True] * n + [False] * (5 - n)
        own = sample[row, :n]
        assert not (own[:-1] == 0).any() and not sample[row, n:].any()
        assert bool(own[-1] == 0) == (not truncated[row])
        assert n == 5 or not truncated[row]
    texts = policy.decode(payload)
    assert texts[0] == "".join(VOCABULARY[i] for i in sample[0][mask[0]].tolist() if i)
    assert not any("<eos>" in text for text in texts)


def test_every_stop_id_of_the_generation_config_ends_a_row() -> None:
    model = build_model()
    model.generation_config.eos_token_id = [0, 3, 4]
    policy = TokenPolicy(model, build_tokenizer(), TokenOptions(max_new_tokens=6))
    _, payload = policy.rollout(*rows_of(ITEMS, 20))
    mask = payload.tensors["mask"]
    before_last = mask & mask.roll(-1, 1)
    before_last[:, -1] = False
    assert not torch.isin(payload.tensors["sample"][before_last], torch.tensor([0, 3, 4])).any()


def test_forwards_count_rows_and_only_completions_reach_the_output_layer() -> None:
    policy = tiny()
    items, keys = rows_of(ITEMS, 4)
    batch, payload = policy.rollout(items, keys)
    assert policy.forwards == int(batch.mask.sum())
    seen: list[tuple[int, ...]] = []
    policy.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    before = policy.forwards
    chunks = policy.chunks(payload, 5)
    for chunk in chunks:
        policy.replay(payload, chunk, ("logp",))
    assert policy.forwards - before == len(items)
    assert seen == [(len(c.rows), int(batch.mask[c.rows].sum(1).max()), 32) for c in chunks]
    before = policy.forwards
    policy.replay(payload, chunks[0], ("logp", "kl_ref"))
    assert policy.forwards - before == 2 * len(chunks[0].rows)


def test_chunks_are_whole_rows_longest_first() -> None:
    policy = tiny()
    _, payload = policy.rollout(*rows_of(ITEMS, 4))
    length = payload.tensors["prompt_mask"].sum(1) + payload.tensors["mask"].sum(1)
    chunks = policy.chunks(payload, 5)
    assert [len(c.rows) for c in chunks] == [5, 5, 2]
    assert all(c.cols.tolist() == list(range(6)) for c in chunks)
    assert length[torch.cat([c.rows for c in chunks])].tolist() == sorted(length.tolist(), reverse=True)
    with pytest.raises(PolicyError, match="limit 0"):
        policy.chunks(payload, 0)


def test_dropout_is_off_even_when_the_trainer_sets_train_mode() -> None:
    policy = tiny(model={"attention_dropout": 0.5})
    policy.modules()["model"].train()
    items, keys = rows_of(ITEMS, 3)
    batch, payload = policy.rollout(items, keys)
    policy.modules()["model"].train()
    out = policy.replay(payload, everything(payload), ("logp",))["logp"]
    assert torch.allclose(out, batch.logp, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"temperature": 0.6}),
        ("gpt2", {"reference": "none", "inference": "greedy"}),
        ("llama", {"lora": {"rank": 2, "alpha": 4}, "reference": "adapters"}),
        ("qwen2", {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}),
    ],
)
def test_the_promises_are_kept(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = check_policy(build_policy(tmp_path, family, **options), ITEMS)
    assert report["replay"] < 1e-5


def test_adapters_train_alone_and_the_reference_is_the_model_without_them() -> None:
    policy = tiny(lora={"rank": 2, "alpha": 8}, reference="adapters")
    base = build_model().eval()
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert len(policy.parameters()) == len(names) and all("lora_" in name for name in names)
    items, keys = rows_of(ITEMS, 2)
    batch, payload = policy.rollout(items, keys)
    for seed in range(2):  # the first adapters do not depend on the global generator
        torch.manual_seed(seed)
        again = tiny(lora={"rank": 2, "alpha": 8}, reference="adapters")
        assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        out = policy.replay(payload, everything(payload), ("logp", "kl_ref"))
        (0.01 * out["kl_ref"].mean() - out["logp"].mean()).backward()
        optimizer.step()
    with torch.no_grad(), policy.reference():
        inside = policy.replay(payload, everything(payload), ("logp", "kl_ref"))
    assert torch.equal(inside["kl_ref"], torch.zeros_like(inside["kl_ref"]))
    for row in range(len(items)):
        log_p, tokens = direct(base, payload, row, 1.0)
        assert torch.allclose(inside["logp"][row, : len(tokens)], log_p.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    outside = policy.replay(payload, everything(payload), ("logp", "kl_ref"))
    assert outside["logp"].mean().item() > batch.logp.mean().item() + 0.01 and outside["kl_ref"].max().item() > 1e-4
    assert all(p.requires_grad for p in policy.parameters()) and len(policy.parameters()) == len(names)


def test_a_saved_policy_is_a_model_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = build_policy(tmp_path)
    with torch.no_grad():
        policy.parameters()[0].add_(0.1)
    items, keys = rows_of(ITEMS, 2)
    batch, payload = policy.rollout(items, keys)
    policy.save(tmp_path / "saved")
    again = TokenPolicy.from_pretrained(tmp_path / "saved", policy.options)
    other, same = again.rollout(items, keys)
    assert torch.equal(other.logp, batch.logp) and again.decode(same) == policy.decode(payload)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    log_p, tokens = direct(theirs, payload, 0, 1.0)
    assert torch.allclose(log_p.gather(1, tokens[:, None])[:, 0], batch.logp[0, : len(tokens)], atol=1e-5)
    policy.model.generation_config.eos_token_id = [0, 3]
    policy.save(tmp_path / "stops")
    assert TokenPolicy.from_pretrained(tmp_path / "stops", policy.options)._stop.tolist() == [0, 3]


def test_saved_adapters_are_read_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    policy = tiny(lora={"rank": 2}, reference="adapters")
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05)
    batch, payload = policy.rollout(*rows_of(ITEMS, 1))
    policy.save(tmp_path)
    theirs = PeftModel.from_pretrained(build_model(), tmp_path).eval()
    log_p, tokens = direct(theirs, payload, 0, 1.0)
    assert torch.allclose(log_p.gather(1, tokens[:, None])[:, 0], batch.logp[0, : len(tokens)], atol=1e-5)


def test_damaged_or_foreign_weights_change_nothing(tmp_path: Path) -> None:
    policy = build_policy(tmp_path)
    policy.save(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    before = [p.clone() for p in policy.parameters()]
    build_policy(tmp_path / "wide", model={"intermediate_size": 48}).save(tmp_path / "wide")
    tiny(lora={"rank": 2}).save(tmp_path / "adapters")
    for folder, message in [
        (tmp_path / "wide", r"do not fit: .*\[32, 48\] there and \[32, 64\] here"),
        (tmp_path / "adapters", "cannot read the weights .*model.safetensors"),
        (tmp_path / "nowhere", "cannot read the weights"),
    ]:
        with pytest.raises(PolicyError, match=message):
            policy.load(folder)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(PolicyError, match="cannot read the weights"):
        policy.load(tmp_path / "saved")
    with pytest.raises(PolicyError, match="cannot load a causal language model from"):
        TokenPolicy.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_from_pretrained_says_what_is_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(PolicyError, match="cannot load a causal language model from .*nowhere"):
        TokenPolicy.from_pretrained(tmp_path / "nowhere")
    build_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(PolicyError, match="cannot load a tokenizer from .*bare.*save_pretrained"):
        TokenPolicy.from_pretrained(tmp_path / "bare")
    folder = build_folder(tmp_path / "holes")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match="lack 1 tensors of LlamaForCausalLM, model.norm.weight first"):
        TokenPolicy.from_pretrained(folder)


def test_prompts_go_through_the_chat_template() -> None:
    text, messages = {"prompt": "l12"}, {"messages": [{"role": "user", "content": "l12"}]}
    policy = tiny()
    assert policy.encode([text]) == [[VOCABULARY.index(c) for c in "l12"]]
    with pytest.raises(PolicyError, match="item 0 needs a chat template"):
        policy.encode([messages])
    with pytest.raises(PolicyError, match="item 0 needs a chat template"):
        tiny(chat=True).encode([text])
    tokenizer = build_tokenizer(CHAT_TEMPLATE)
    chat = TokenPolicy(build_model(), tokenizer, TokenOptions(max_new_tokens=6))
    assert chat.encode([text, messages]) == [[VOCABULARY.index(c) for c in "l12:"]] * 2
    plain = TokenPolicy(build_model(), tokenizer, TokenOptions(max_new_tokens=6, chat=False))
    assert plain.encode([text]) == [[VOCABULARY.index(c) for c in "l12"]]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"prompt": ""}, "item 1 has a prompt that is empty"),
        ({"prompt": "  \n"}, "item 1 has a prompt that is empty"),
        ({"prompt": 3}, "item 1 has a prompt that is empty or no text"),
        ({"messages": []}, "item 1 has a prompt that is empty"),
        ("l1:", "item 1 must be"),
        ({"text": "l1:"}, "item 1 must be"),
        ({"prompt": "1" * 59}, "59 prompt tokens and 6 new ones are more than the model's 64 positions"),
    ],
)
def test_items_that_cannot_be_used_are_named(item: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        tiny().rollout([ITEMS[0], item], make_keys(0, 0, 2, 1))


def test_options_and_models_that_cannot_work_are_refused() -> None:
    policy = tiny(reference="none")
    assert policy.channel_names == ("logp", "entropy")
    with pytest.raises(PolicyError, match="reference: none"), policy.reference():
        pass
    batch, payload = policy.rollout(*rows_of(ITEMS, 1))
    with pytest.raises(PolicyError, match="no channel 'kl_ref'; it has"):
        policy.replay(payload, everything(payload), ("logp", "kl_ref"))
    with pytest.raises(PolicyError, match="one key per item"):
        policy.rollout(ITEMS, make_keys(0, 0, 1, 1))
    with pytest.raises(ValueError, match="adapters needs adapters"):
        TokenOptions(reference="adapters")
    with pytest.raises(ValueError, match="greater than 0"):
        TokenOptions(temperature=0)
    with pytest.raises(ValueError, match="top_k"):
        TokenOptions(top_k=5)  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match="policy.lora.targets.*nothing_like_it"):
        tiny(lora={"targets": ["nothing_like_it"]})
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(PolicyError, match="no end-of-sequence token"):
        TokenPolicy(build_model(eos_token_id=None), tokenizer)
    with pytest.raises(PolicyError, match="Linear.forward takes no"):
        TokenPolicy(_Linear(), build_tokenizer())


class _Linear(torch.nn.Linear):
    config = None

    def __init__(self) -> None:
        super().__init__(1, 1)


def test_the_toy_pipeline_decodes_scores_and_saves(tmp_path: Path) -> None:
    pipeline = ToyTextPipeline(tiny())
    assert {x["prompt"] for x in pipeline.prompts}.isdisjoint(x["prompt"] for x in pipeline.heldout)
    items = pipeline.prompts[:3]
    samples = pipeline.decode(pipeline.policy.infer(items, make_keys(0, 0, 3, 1)))
    files = pipeline.save_samples(samples, tmp_path, ["000", "001", "002"])
    assert [(tmp_path / f).read_text() for f in files] == samples["text"]
    assert pipeline.guards(samples, items)["length"] == sum(map(len, samples["text"])) / 3

    class Batch:
        prompts = [{"target": "1"}, {"target": "2"}, {"target": "1"}, {"target": "2"}]
        samples = {"text": ["1", "32", "", "2222"]}

    assert last_reward(Batch) == [1.0, 0.0, 0.0, 0.25]
    assert even_reward(Batch) == [0.0, 0.5, 0.0, 1.0]
    assert prompts("even")[0][0] == {"prompt": "e0:", "target": "0"}

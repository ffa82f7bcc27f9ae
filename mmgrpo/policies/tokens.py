"""A policy over a causal language model of transformers: every generated token is a decision."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import pad

from ..config import Section
from ..core import Rollouts
from ..sampling.keys import Keys, uniform
from .base import Chunk, Payload, PolicyError
from .reference import Reference
from .weights import load_weights, save_weights, trained

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"  # the names that transformers and peft give
LORA_SEED = 0  # the first adapter weights are the same on every rank and in every run
_INPUTS = ("input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache")


class LoraOptions(Section):
    """Low-rank adapters (Hu et al. 2021) through peft; only they are trained."""

    rank: int = Field(8, ge=1, description="Rank of each adapter.")
    alpha: int = Field(16, ge=1, description="The adapter's output is scaled by alpha / rank.")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the adapted layers; all-linear: every linear layer but the output layer."
    )


class TokenOptions(Section):
    """How a language model is sampled and trained."""

    max_new_tokens: int = Field(64, ge=1, description="Longest completion; also T, the width of the batch.")
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it, in sampling and in every channel.")
    chat: bool | None = Field(
        None, description="Send {prompt: text} through the chat template as a user message; null: if there is one."
    )
    inference: Literal["sample", "greedy"] = Field("sample", description="How the model is used after training.")
    lora: LoraOptions | None = Field(None, description="Train low-rank adapters instead of all weights.")
    reference: Literal["copy", "adapters", "none"] = Field(
        "copy", description="The KL's reference: a frozen copy of the model, the model without its adapters, or none."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Any:
        if self.reference == "adapters" and self.lora is None:
            raise PolicyError("reference: adapters needs adapters to switch off: set policy.lora, or reference: copy")
        return self


class TokenPolicy:
    """Samples completions token by token and replays their log-probs.

    Items are `{"prompt": str}` or `{"messages": [{"role": ..., "content": ...}, ...]}`; other entries are left alone.
    A rollout is [B,T] with T = max_new_tokens. Its mask is True up to and including the end-of-sequence token, which
    is a decision like any other; `keys["truncated"]` [B] is 1 where the limit came first. Payload tensors, all padded
    on the right: `prompt_ids` [B,P], `prompt_mask` [B,P], `sample` [B,T] the generated ids, `mask` [B,T].

    Channels, [r,c] each and 0 at masked decisions, all of the distribution that tokens are drawn from (temperature
    included): `logp`; `entropy` over the whole vocabulary in nats; `kl_ref`, the closed-form KL(policy || reference).

    `forwards` counts one per row and call of the model, whatever the number of positions: a rollout of n tokens costs
    n (the prompt's pass gives the first token), a replay 1, and `kl_ref` 1 more.

    The model always runs in evaluation mode: dropout would make the replayed policy another one than was sampled.

    Args:
        model: a causal language model of transformers; must take attention_mask, position_ids and logits_to_keep.
        tokenizer: its tokenizer. No padding token is needed: padding is masked everywhere.
        options: see TokenOptions.

    Raises:
        PolicyError: the model lacks an input, no end-of-sequence token is known, the options contradict each other.
    """

    def __init__(self, model: Any, tokenizer: Any, options: TokenOptions | None = None) -> None:
        self.options = options or TokenOptions()
        self.tokenizer = tokenizer
        self.forwards = 0
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self._stop = _stop_ids(model, tokenizer)
        self._cache = _cache_name(model)
        self._reference = Reference(model, self.options.reference)
        self.model: Any = model if self.options.lora is None else _add_lora(model, self.options.lora)
        self.channel_names: tuple[str, ...] = ("logp", "entropy")
        if self.options.reference != "none":
            self.channel_names += ("kl_ref",)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, options: TokenOptions | None = None, device: torch.device | str = "cpu"
    ) -> TokenPolicy:
        """The policy of a folder (or hub name) with config, safetensors weights and tokenizer; weights in float32.

        Raises:
            PolicyError: something is missing or does not fit.
        """
        from transformers import AutoTokenizer

        model = _load_model(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:  # transformers raises many kinds here; all mean the same to the user
            raise PolicyError(
                f"cannot load a tokenizer from {path}: {_first_line(error)}. "
                "Save it there with tokenizer.save_pretrained"
            ) from error
        return cls(model.to(device), tokenizer, options)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def encode(self, items: Sequence[Any]) -> list[list[int]]:
        """The prompt of each item as token ids.

        Raises:
            PolicyError: an item has no text, needs a chat template that is not there, or does not fit the model.
        """
        return [self._encode(i, item) for i, item in enumerate(items)]

    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        """Draw one completion per item. Token t of a row depends on its prompt and one keyed uniform."""
        payload, logp = self._generate(items, keys, greedy=False)
        mask = payload.tensors["mask"]
        last = payload.tensors["sample"].gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
        truncated = ~torch.isin(last, self._stop.to(last.device))
        return Rollouts(logp, mask, keys.group.to(self.device), keys={"truncated": truncated.long()}), payload

    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        """Completions as after training: the likeliest token each time, or plain sampling (`options.inference`)."""
        return self._generate(items, keys, greedy=self.options.inference == "greedy")[0]

    def decode(self, payload: Payload) -> list[str]:
        """The completions as text, without special tokens."""
        rows = zip(payload.tensors["sample"].cpu(), payload.tensors["mask"].cpu(), strict=True)
        return [self.tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True) for ids, mask in rows]

    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        """Whole rows, at most `limit` at a time, the longest first: rows of like length waste little padding."""
        if limit < 1:
            raise PolicyError(f"a chunk must hold at least 1 row, got limit {limit}")
        length = payload.tensors["prompt_mask"].sum(1) + payload.tensors["mask"].sum(1)
        order = length.argsort(descending=True, stable=True).cpu()
        cols = torch.arange(payload.tensors["mask"].shape[1])
        return [Chunk(rows, cols) for rows in order.split(limit)]

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        """The named channels at the chunk's decisions, [r,c] float32 each. Only completions reach the output layer."""
        unknown = sorted(set(channels) - set(self.channel_names))
        if unknown:
            raise PolicyError(f"this policy has no channel {unknown[0]!r}; it has {list(self.channel_names)}")
        part = payload.select(chunk.rows).to(self.device).tensors
        ids, attention = _left_align(part["prompt_ids"], part["prompt_mask"])
        width = int(part["mask"].sum(1).max())
        sample, mask = part["sample"][:, :width], part["mask"][:, :width]
        ids = torch.cat([ids, sample[:, :-1]], 1)
        attention = torch.cat([attention, mask[:, :-1]], 1)
        reference = None
        if "kl_ref" in channels:
            with torch.no_grad(), self.reference():
                reference = self._log_probs(ids, attention, width)
        log_p = self._log_probs(ids, attention, width)
        values = {name: _channel(name, log_p, sample, reference) for name in channels}
        extra = part["mask"].shape[1] - width
        cols = chunk.cols.to(self.device)
        return {name: pad(value.where(mask, 0), (0, extra))[:, cols] for name, value in values.items()}

    def reference(self) -> AbstractContextManager[None]:
        """Inside, rollout, infer and replay answer for the weights that the policy was made with.

        Raises:
            PolicyError: the options say `reference: none`.
        """
        return self._reference.on(self.model)

    def parameters(self) -> list[torch.nn.Parameter]:
        """All weights, or those of the adapters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def modules(self) -> dict[str, torch.nn.Module]:
        """The language model."""
        return {"model": self.model}

    def save(self, folder: Path) -> None:
        """Write the weights (only the adapters' with lora), the model's configuration and the tokenizer.

        Without lora the folder is one that `from_pretrained` reads, ours or transformers'.
        """
        if self.options.lora is not None:
            # left to itself, peft asks the hub whether the vocabulary was changed
            self.model.save_pretrained(folder, save_embedding_layers=False)
            return
        save_weights(trained(self.model), Path(folder) / WEIGHTS)
        self.model.config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, in place; the reference stays as it was.

        Raises:
            PolicyError: a file is missing or damaged, or its names or shapes are not those of this model.
        """
        if self.options.lora is None:
            load_weights(trained(self.model), Path(folder) / WEIGHTS)
            return
        from peft import get_peft_model_state_dict

        adapters = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        load_weights(adapters, Path(folder) / ADAPTERS)

    def _encode(self, i: int, item: Any) -> list[int]:
        if not isinstance(item, Mapping) or not ("prompt" in item or "messages" in item):
            raise PolicyError(f'item {i} must be {{"prompt": text}} or {{"messages": [...]}}, got {str(item)[:80]}')
        messages = item["messages"] if "messages" in item else [{"role": "user", "content": item["prompt"]}]
        contents: list[Any] = [m.get("content") for m in messages]
        if not contents or any(not isinstance(text, str) or not text.strip() for text in contents):
            raise PolicyError(f"item {i} has a prompt that is empty or no text: {str(item)[:80]}; give it text")
        template = bool(getattr(self.tokenizer, "chat_template", None))
        chat = "messages" in item or (template if self.options.chat is None else self.options.chat)
        if chat and not template:
            raise PolicyError(f"item {i} needs a chat template and the tokenizer has none; use prompts and chat: false")
        text = contents[0]
        if chat:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=not chat)["input_ids"]
        total = len(ids) + self.options.max_new_tokens
        if not ids:
            raise PolicyError(f"item {i}: the tokenizer makes no token of the prompt {text[:80]!r}")
        if self._limit is not None and total > self._limit:
            raise PolicyError(
                f"item {i}: {len(ids)} prompt tokens and {self.options.max_new_tokens} new ones are more than the "
                f"model's {self._limit} positions; shorten the prompt or policy.max_new_tokens"
            )
        return ids

    @torch.no_grad()
    def _generate(self, items: Sequence[Any], keys: Keys, greedy: bool) -> tuple[Payload, Tensor]:
        """Completions and their log-probs [B,T] float32. Rows leave the batch, and the cache, when they end."""
        if not items or len(items) != len(keys):
            raise PolicyError(f"a rollout needs one key per item and at least one, got {len(items)} and {len(keys)}")
        prompts = _pad_right(self.encode(items))
        B, T = len(items), self.options.max_new_tokens
        u = uniform(keys.per_rollout("token"), (T,)).to(self.device)
        ids, attention = (x.to(self.device) for x in _left_align(*prompts))
        sample = torch.zeros(B, T, dtype=torch.long, device=self.device)
        mask = torch.zeros(B, T, dtype=torch.bool, device=self.device)
        logp = torch.zeros(B, T, device=self.device)
        rows = torch.arange(B, device=self.device)
        stop, cache = self._stop.to(self.device), None
        for t in range(T):
            past: dict[str, Any] = {} if cache is None else {self._cache: cache}
            output = self._forward(ids, attention, 1, use_cache=True, **past)
            log_p = _tempered(output.logits[:, -1], self.options.temperature)
            token = log_p.argmax(1) if greedy else draw(log_p, u[rows, t])
            sample[rows, t], mask[rows, t] = token, True
            logp[rows, t] = log_p.gather(1, token[:, None])[:, 0].float()
            going = (~torch.isin(token, stop)).nonzero()[:, 0]
            if len(going) == 0:
                break
            cache = output[self._cache]
            if len(going) < len(rows):
                cache.batch_select_indices(going)
            rows, ids = rows[going], token[going, None]
            attention = pad(attention[going], (0, 1), value=True)
        tensors = {"prompt_ids": prompts[0], "prompt_mask": prompts[1], "sample": sample, "mask": mask}
        return Payload(tensors, list(items), {}).to(self.device), logp

    def _forward(self, ids: Tensor, attention: Tensor, keep: int, **options: Any) -> Any:
        """One call of the model: ids [b,n] after what the cache holds, attention [b,m] over all, logits [b,keep,V]."""
        model: Any = self._reference.answering(self.model)
        model.eval()
        self.forwards += len(ids)
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return model(
            input_ids=ids,
            attention_mask=attention.long(),
            position_ids=positions,
            logits_to_keep=keep,
            **options,
        )

    def _log_probs(self, ids: Tensor, attention: Tensor, keep: int) -> Tensor:
        """[b,keep,V] log-probs of the tokens after the last `keep` positions of ids [b,n]."""
        logits = self._forward(ids, attention, keep, use_cache=False).logits
        return _tempered(logits, self.options.temperature)


def draw(log_p: Tensor, u: Tensor) -> Tensor:
    """Tokens by the inverse of the cumulative distribution, in float64.

    Args:
        log_p: [b,V] log-probs.
        u: [b] float64 in (0,1).

    Returns:
        [b] long: the first token at which the cumulative probability exceeds u. Never one of probability zero.

    Raises:
        PolicyError: the model's output is not finite.
    """
    cumulative = log_p.double().exp().cumsum(1)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise PolicyError("the model's logits are not finite; the weights are damaged or the learning rate is too high")
    # strictly below the total, so that rounding cannot step past the last token that has any probability
    point = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs of the distribution that tokens are drawn from, in float32 or better."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def _channel(name: str, log_p: Tensor, sample: Tensor, reference: Tensor | None) -> Tensor:
    """[r,c] of one channel from log-probs [r,c,V] of the policy and of the reference, and the tokens drawn [r,c]."""
    if name == "logp":
        return log_p.gather(2, sample[..., None])[..., 0]
    # exp(-1e4) is exactly 0: an impossible token then adds 0, where 0 * -inf would be NaN
    log_p = log_p.clamp(min=-1e4)
    if name == "entropy":
        return -(log_p.exp() * log_p).sum(2)
    assert reference is not None
    return (log_p.exp() * (log_p - reference.clamp(min=-1e4))).sum(2)


def _pad_right(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B,P] padded with 0, and their mask [B,P] bool."""
    rows = [torch.tensor(p) for p in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(p) for p in prompts])[:, None]


def _left_align(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows with the padding on the left and no column that is all padding: completions line up after them."""
    length = mask.sum(1, keepdim=True)
    width = int(length.max())
    source = torch.arange(width, device=ids.device) - (width - length)
    return ids.gather(1, source.clamp(min=0)), source >= 0


def _stop_ids(model: Any, tokenizer: Any) -> Tensor:
    """The end-of-sequence ids: the generation config's, as in transformers' own generate, else the tokenizer's."""
    config = getattr(model, "generation_config", None)
    stop = getattr(config, "eos_token_id", None)
    stop = tokenizer.eos_token_id if stop is None else stop
    if stop is None:
        raise PolicyError("no end-of-sequence token is known; set eos_token on the tokenizer and save it again")
    return torch.tensor(stop).reshape(-1)


def _cache_name(model: Any) -> str:
    """What the model calls its key-value cache, in its inputs and outputs; transformers renamed it."""
    inputs = inspect.signature(model.forward).parameters
    names = [name for name in ("cache", "past_key_values") if name in inputs]
    missing = [name for name in _INPUTS if name not in inputs]
    if missing or not names:
        raise PolicyError(
            f"{type(model).__name__}.forward takes no {(missing or ['key-value cache'])[0]}; "
            "use a decoder-only language model of transformers"
        )
    return names[0]


def _add_lora(model: Any, options: LoraOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=options.targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(LORA_SEED)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise PolicyError(f"policy.lora.targets {options.targets}: {_first_line(error)}") from error


def _load_model(path: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many kinds here; all mean the same to the user
        raise PolicyError(
            f"cannot load a causal language model from {path}: {_first_line(error)}. "
            "The folder must hold config.json and model.safetensors"
        ) from error
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise PolicyError(
            f"the weights in {path} lack {len(absent)} tensors of {type(model).__name__}, {absent[0]} first; "
            "they would be random: use a complete checkpoint of the same model"
        )
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

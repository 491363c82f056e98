"""vLLM's `LLM` as far as memory goes: no token is computed.

An engine with `distributed_executor_backend="external_launcher"`, or where
`VLLM_ENABLE_V1_MULTIPROCESSING=0`, runs in the script's process and asks PyTorch's allocator for
its memory; another one is a process of its own. With `enable_sleep_mode` weights and KV cache lie
in a pool whose pages go back to the driver.
"""

from __future__ import annotations

import os
import weakref
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import torch

from memplan.capturing.standins.engine import (
    EngineMemory,
    ModelSizes,
    activation_sizes,
    block_bytes,
    blocks_for,
    graph_sizes,
    model_sizes,
    some_tokens,
    tokens_of,
)
from memplan.capturing.standins.rules import running
from memplan.capturing.state import CaptureState
from memplan.types.engines import Engine, Sizes

from . import settings_of
from .logprobs import Logprob
from .outputs import CompletionOutput, RequestOutput
from .sampling_params import SamplingParams
from .settings_of import FITTING

__version__ = "0.27.1"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_POOLED = ("weights", "kv_cache")
_LARGE_CARD = 70 << 30
_HELP = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_NOT_FOLLOWED = {
    "quantization": "quantised weights",
    "cpu_offload_gb": "weights on the host",
    "enable_lora": "adapters",
    "speculative_config": "speculative decoding",
}
_KINDS = ("tensor", "pipeline", "data")
_SMALLER = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element of the KV cache, where it is not the model's."""


class LLM:
    """An engine, with what training loops use of it."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: Any = "auto",
        gpu_memory_utilization: float | str = 0.92,
        max_model_len: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_sleep_mode: bool = False,
        enforce_eager: bool = False,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        distributed_executor_backend: Any = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        **settings: Any,
    ) -> None:
        """Raises ValueError where vLLM does: for a share outside (0, 1], one that is not free when
        it starts, one that leaves no room for the KV cache, and a `max_model_len` that is no
        length. CaptureError for what is not followed."""
        import transformers

        state = running()
        if state is None:
            raise RuntimeError("a stand-in for vLLM works only while memplan captures a job")
        share = settings_of.share(gpu_memory_utilization)
        longest = settings_of.longest(max_model_len)
        _refuse_unfollowed(state, settings)
        config = transformers.AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, revision=revision
        )
        self._tokenizer_name = tokenizer or model
        self._tokenizer: Any = None
        self._sizes = model_sizes(config, _dtype(config, dtype))
        self._longest = self._sizes.longest if longest in (None, FITTING) else longest
        self._fitting = longest == FITTING
        self._sleep_mode = enable_sleep_mode
        self._asleep: set[str] = set()
        self._on_host: torch.Tensor | None = None
        sequences, tokens = _of_a_batch(max_num_seqs, max_num_batched_tokens)
        separate = _is_separate(distributed_executor_backend)
        self._memory = EngineMemory(state, "vllm", pooled=enable_sleep_mode, separate=separate)
        if enable_sleep_mode and not separate:
            used = any(one.sleeps and not one.separate for one in state.engines)
            assert not used, "Sleep mode can only be used for one instance per process."
        short = self._fitting or self._sizes.windowed
        with state.stage("engine start"):
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            self._engine = Engine(
                name=self._memory.name,
                model=str(model),
                share=share,
                share_decides=kv_cache_memory_bytes is None,
                card_bytes=total,
                weight_bytes=self._sizes.weights,
                activations=activation_sizes(self._sizes, tokens, sequences),
                graphs=Sizes(0, 0, 0) if enforce_eager else graph_sizes(self._sizes, sequences),
                block_bytes=_block_bytes(self._sizes, kv_cache_dtype),
                layers=self._sizes.layers,
                least_blocks=1 if short else blocks_for(self._longest),
                sleeps=enable_sleep_mode,
                separate=separate,
                begin=len(state.recorder.builder),
            )
            self._start(free, kv_cache_memory_bytes)
        state.engines.append(self._engine)
        _assume(state, share)
        weakref.finalize(self, self._memory.give_all)
        self.llm_engine = self._as_seen()

    def _start(self, free: int, kv_bytes: int | None) -> None:
        """Load the weights, run the model once, and take what is left for the KV cache."""
        engine, memory = self._engine, self._memory
        requested = engine.requested_bytes(engine.share)
        if free < requested:
            raise ValueError(
                f"Free memory on device cuda:0 ({_gib(free)}/{_gib(engine.card_bytes)} GiB) on "
                f"startup is less than desired GPU memory utilization ({engine.share}, "
                f"{_gib(requested)} GiB). Decrease GPU memory utilization or reduce GPU memory "
                "used by other processes."
            )
        memory.take("weights", _exactly(engine.weight_bytes))
        memory.take("activations", engine.activations_at_most)
        memory.give("activations")
        torch.cuda.empty_cache()
        if kv_bytes is None:
            self._check_room()
            self._kv = engine.kv_bytes(engine.share).at_least(engine.least_bytes)
        else:
            self._kv = _exactly(kv_bytes // engine.block_bytes * engine.block_bytes)
        memory.take("kv_cache", self._kv, engine.layers)
        memory.take("graphs", engine.graphs)
        if self._fitting and not self._sizes.windowed:
            self._fit_longest()

    def _fit_longest(self) -> None:
        """Shorten texts to what the KV cache can hold at most: else training asks for less."""
        most = tokens_of(self._kv.high // self._engine.block_bytes)
        if self._kv.low < blocks_for(self._longest) * self._engine.block_bytes:
            self._memory.state.assume(
                "engine",
                "max_model_len is as long as the KV cache has room for: at most "
                f"{min(most, self._longest):,} of the model's {self._longest:,} tokens",
            )
        self._longest = min(most, self._longest)

    def _check_room(self) -> None:
        engine = self._engine
        least, room = engine.least_bytes, engine.most_kv_bytes(engine.share)
        if room <= 0:
            raise ValueError(
                "No available memory for the cache blocks. Try increasing "
                f"`gpu_memory_utilization` when initializing the engine. {_HELP}"
            )
        if room < least:
            raise ValueError(
                "To serve at least one request with the models's max seq len "
                f"({self._longest}), {_gib(least)} GiB KV cache is needed, which is larger than "
                f"the available KV cache memory ({_gib(room)} GiB). Try increasing "
                "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
                f"engine. {_HELP}"
            )
        if engine.kv_bytes(engine.share).low < least:
            self._memory.state.assume(
                "engine",
                "vLLM's share of the card may be too small for the KV cache of one sequence of "
                f"{self._longest:,} tokens: then it does not start",
            )

    # What training loops call

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *_more: Any,
        **_settings: Any,
    ) -> list[RequestOutput]:
        """Completions as long as they may be. Raises RuntimeError while a part is asleep, where
        vLLM would compute on memory that is not there."""
        if self._asleep:
            raise RuntimeError(f"the engine sleeps: wake_up({sorted(self._asleep)}) comes first")
        listed = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        if listed and isinstance(listed[0], Integral):
            listed = [listed]
        one = sampling_params or SamplingParams()
        every = [one] * len(listed) if isinstance(one, SamplingParams) else list(one)
        memory = self._memory
        with memory.state.stage("generation"):
            memory.take("activations", self._engine.activations_at_most)
            memory.give("activations")
            return [
                self._complete(number, prompt, one)
                for number, (prompt, one) in enumerate(zip(listed, every, strict=True))
            ]

    def chat(
        self, messages: Any, sampling_params: Any = None, *_more: Any, **_settings: Any
    ) -> list[RequestOutput]:
        """The same, of conversations."""
        talks = list(messages)
        if talks and isinstance(talks[0], dict):
            talks = [talks]
        apply = self.get_tokenizer().apply_chat_template
        prompts = [
            {"prompt": apply(talk, tokenize=False, add_generation_prompt=True)} for talk in talks
        ]
        return self.generate(prompts, sampling_params)

    def sleep(self, level: int = 1, **_settings: Any) -> None:
        """Give the pool back: level 1 keeps the weights on the host, 2 drops them."""
        self._needs_sleep_mode()
        memory = self._memory
        with memory.state.stage(""):
            for part in _POOLED:
                memory.give(part)
            self._asleep.update(_POOLED)
            if level == 1:
                self._on_host = memory.on_host(self._engine.weight_bytes)
            torch.cuda.empty_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take it again."""
        self._needs_sleep_mode()
        wanted = list(_POOLED) if tags is None else tags
        stage = "weight sync" if wanted == ["weights"] else "generation"
        with self._memory.state.stage(stage):
            for part in (one for one in _POOLED if one in wanted):
                if part == "weights":
                    self._memory.take(part, _exactly(self._engine.weight_bytes))
                else:
                    self._memory.take(part, self._kv, self._engine.layers)
                self._asleep.discard(part)
            if "weights" in wanted:
                self._on_host = None

    def _needs_sleep_mode(self) -> None:
        if not self._sleep_mode:
            raise ValueError("Sleep mode is not enabled. Please set enable_sleep_mode=True.")

    def collective_rpc(self, method: Any, *_more: Any, **_settings: Any) -> list[Any]:
        """What the worker does is not known here. Loading weights copies them in place."""
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if not isinstance(method, str) or ("weight" not in name and "param" not in name):
            state = self._memory.state
            state.assume(
                "engine", f"what {name} does in the engine is taken to need nothing of the card"
            )
        return [None]

    def get_tokenizer(self) -> Any:
        """The model's."""
        if self._tokenizer is None:
            import transformers

            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._tokenizer_name)
        return self._tokenizer

    def reset_prefix_cache(self, *_more: Any, **_settings: Any) -> bool:
        """Blocks of the KV cache are free again; it keeps its size."""
        return True

    def _complete(self, number: int, prompt: Any, params: Any) -> RequestOutput:
        text, ids = self._prompt(prompt)
        room = self._longest - len(ids)
        if room < 1:
            raise ValueError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length "
                f"of {self._longest}."
            )
        count = room if params.max_tokens is None else min(params.max_tokens, room)
        tokens = some_tokens(self._sizes.vocabulary, count)
        beside = None if params.logprobs is None else range(max(params.logprobs, 1))
        decode = self._decode
        outputs = []
        for index in range(params.n):
            known = None
            if beside is not None:
                known = [
                    {token + rank: Logprob(-1.0 - rank, rank + 1) for rank in beside}
                    for token in tokens
                ]
            outputs.append(CompletionOutput(index, list(tokens), known, decode))
        return RequestOutput(str(number), text, ids, outputs)

    def _prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            ids = prompt.get("prompt_token_ids")
            if ids is not None:
                return prompt.get("prompt"), [int(token) for token in ids]
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, list(self.get_tokenizer()(prompt)["input_ids"])
        return None, [int(token) for token in prompt]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.get_tokenizer().decode(tokens))

    def _as_seen(self) -> Any:
        """The way down to the model that weights are loaded into."""
        model = SimpleNamespace(load_weights=lambda weights: {name for name, _ in weights})
        runner = SimpleNamespace(model=model)
        worker = SimpleNamespace(model_runner=runner)
        return SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=self._longest),
            model_executor=SimpleNamespace(
                driver_worker=worker, collective_rpc=self.collective_rpc
            ),
            reset_prefix_cache=self.reset_prefix_cache,
        )


def _dtype(config: Any, asked: Any) -> torch.dtype:
    """Single precision is loaded in half unless it is asked for."""
    if isinstance(asked, torch.dtype):
        return asked
    if asked != "auto":
        names = {"half": "float16", "float": "float32"}
        found: torch.dtype = getattr(torch, names.get(asked, asked))
        return found
    stored = getattr(config.get_text_config(), "dtype", None) or config.dtype or torch.float32
    if stored != torch.float32:
        return stored
    capable = torch.cuda.get_device_capability()[0] >= 8
    return torch.bfloat16 if capable else torch.float16


def _of_a_batch(sequences: int | None, tokens: int | None) -> tuple[int, int]:
    """Sequences and tokens at most, by default those for the card."""
    large = torch.cuda.get_device_properties(0).total_memory >= _LARGE_CARD
    return sequences or (1024 if large else 256), tokens or (16384 if large else 8192)


def _is_separate(backend: Any) -> bool:
    """Whether the engine is a process of its own."""
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    return not (in_process or backend == "external_launcher")


def _exactly(nbytes: int) -> Sizes:
    return Sizes(nbytes, nbytes, nbytes)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f}"


def _refuse_unfollowed(state: CaptureState, settings: dict[str, Any]) -> None:
    for name, what in _NOT_FOLLOWED.items():
        if settings.get(name):
            raise state.cannot(
                f"vllm.LLM({name}=…)",
                f"{what} are not followed in an engine beside a training",
                "estimate without it; a plain engine fills the same share of the card",
            )
    if max(settings.get(f"{kind}_parallel_size") or 1 for kind in _KINDS) > 1:
        raise state.cannot(
            "an engine on several cards",
            "only one that shares one card with the training is followed",
            "estimate with tensor_parallel_size=1",
        )


def _block_bytes(sizes: ModelSizes, kv_cache_dtype: str) -> int:
    """Bytes of a block of the KV cache, whose elements may be smaller than the model's."""
    smaller = _SMALLER.get(kv_cache_dtype, sizes.element)
    return block_bytes(sizes) * smaller // sizes.element


def _assume(state: CaptureState, share: float) -> None:
    state.assume(
        "engine",
        f"vLLM {__version__} fills its share of the card, {share:g}; how it divides it among KV "
        "cache, activations and CUDA graphs is a rule, not measured here; the time that it "
        "generates is not counted",
    )

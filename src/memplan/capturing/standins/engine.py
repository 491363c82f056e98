"""Inference engines that share the card with a training: what they take of it, and when.

After vLLM 0.27.1 (`v1/worker/gpu_worker.py`, `v1/worker/utils.py`, `v1/core/kv_cache_utils.py`,
`device_allocator/cumem.py`): an engine loads its weights, runs the model once on as many tokens as
it will ever batch, and takes all that is then left of its share of the card for the KV cache. How
the rest is divided hangs on that run, which is not done here; the sum does not.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capturing.standins.rules import running
from memplan.capturing.state import CaptureState
from memplan.types.engines import GRAPH_NODE_BYTES, Sizes
from memplan.types.trace import OUTSIDE, PRIVATE_POOLS, Role

_VOCABULARY_PAD = 64
"""Rows of an embedding are rounded up to this (`vocab_parallel_embedding.py`)."""
_SAMPLER_BYTES = 2 + 4 + 4 + 4 + 8
"""Bytes for each logit: in half and in single precision, its probability, sorted, and its index."""
_NODES_PER_LAYER = 12
_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class ModelSizes:
    """What the configuration of a model says, in bytes unless it is a count."""

    weights: int
    element: int
    layers: int
    vocabulary: int
    longest: int
    """Tokens of a sequence, at most."""
    token_kv: int
    """Keys and values of a token in all layers."""
    token_activations: int
    """Activations of a token in the layer that holds the most."""
    windowed: bool
    """Whether some layers keep less than the whole sequence."""


def model_sizes(config: Any, dtype: torch.dtype) -> ModelSizes:
    """Sizes of a transformers model, built from its configuration without memory."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    factory = getattr(transformers, names[0], None)
    with torch.device("meta"):
        if factory is not None:
            model = factory._from_config(config, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    elements = sum(parameter.numel() for parameter in model.parameters())
    embeddings = {model.get_input_embeddings().weight}
    if (head := model.get_output_embeddings()) is not None:
        embeddings.add(head.weight)
    elements += sum(-weight.shape[0] % _VOCABULARY_PAD * weight.shape[1] for weight in embeddings)
    text, size = config.get_text_config(), dtype.itemsize
    heads = text.num_attention_heads
    wide = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    token = 2 * key_heads * wide
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention caches one vector
        token = text.kv_lora_rank + text.qk_rope_head_dim
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "moe_intermediate_size", None):
        inner = max(inner, text.moe_intermediate_size * text.num_experts_per_tok)
    longest = text.max_position_embeddings
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return ModelSizes(
        weights=(elements + longest * wide) * size,  # with the table of rotary embeddings
        element=size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        longest=longest,
        token_kv=token * text.num_hidden_layers * size,
        token_activations=(2 * text.hidden_size + 3 * inner) * size,
        windowed=kinds != {"full_attention"},
    )


def activation_sizes(sizes: ModelSizes, tokens: int, sequences: int) -> Sizes:
    """Activations of the profile run: a layer's, or those of the sampler."""
    most = max(tokens * sizes.token_activations, sequences * sizes.vocabulary * _SAMPLER_BYTES)
    return Sizes(most // 2, most, 2 * most)


def graph_sizes(sizes: ModelSizes, sequences: int) -> Sizes:
    """CUDA graphs: one for each size that is captured (1, 2, 4, then every 8, from 256 on every 16,
    up to twice the sequences or 512), whole and in pieces."""
    most = min(2 * sequences, 512)
    captured = 3 + min(most, 256) // 8 + max(most - 256, 0) // 16
    nodes = 2 * captured * sizes.layers * _NODES_PER_LAYER
    return Sizes(*(nodes * size for size in GRAPH_NODE_BYTES))


class EngineMemory:
    """An engine's memory on the fake card. `take` and `give` are what a stand-in does with it."""

    def __init__(self, state: CaptureState, package: str, *, pooled: bool, separate: bool) -> None:
        """`pooled`: weights and KV cache in a pool of the engine's own, which can be emptied;
        `separate`: in a process of its own."""
        self.state = state
        number = len(state.engines) + 1
        self.name = package if number == 1 else f"{package}-{number}"
        """The name of this engine among those of the job."""
        self._package, self._pooled, self._separate = package, pooled, separate
        self._held: dict[str, list[tuple[int, Sizes, int]]] = {}

    def take(self, part: str, sizes: Sizes, pieces: int = 1) -> None:
        """Hold a part from now on, in so many equal pieces, unless it is held already."""
        if part in self._held or not self._running:
            return
        stream, each = self._stream(part), sizes.divided(pieces)
        self._begins(part)
        name, role = f"{self.name}.{part}", _ROLES.get(part, Role.ENGINE)
        hold = self.state.recorder.hold
        self._held[part] = [
            (hold(each, name=name, role=role, stream=stream), each, stream) for _ in range(pieces)
        ]

    def give(self, part: str) -> None:
        """Hold it no more."""
        held = self._held.pop(part, [])
        if held and self._running:
            self._begins("release")
            for piece in held:
                self.state.recorder.let_go(*piece)

    def on_host(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host, as long as it is referred to."""
        state = self.state
        made = state.blank([nbytes], torch.uint8, "cpu")
        state.host.pin(made)
        return made

    def _begins(self, what: str) -> None:
        with torch.no_grad():
            self.state.begin_host_op(f"{self._package}.{what}", sys._getframe(1))

    def give_all(self) -> None:
        """The engine is gone."""
        for part in list(self._held):
            self.give(part)

    @property
    def _running(self) -> bool:
        return running() is self.state

    def _stream(self, part: str) -> int:
        if self._separate or (self._pooled and part in ("weights", "kv_cache")):
            return OUTSIDE
        return PRIVATE_POOLS if part == "graphs" else self.state.recorder.stream


_ROLES = {"activations": Role.WORKSPACE}


def some_tokens(vocabulary: int, count: int) -> list[int]:
    """Tokens from the middle of a vocabulary: special tokens are at its ends."""
    several = max(vocabulary // 8, 1)
    return [vocabulary // 2 + place % several for place in range(count)]


def blocks_for(tokens: int) -> int:
    """Blocks of the KV cache for a sequence."""
    return math.ceil(tokens / _BLOCK_TOKENS)


def tokens_of(blocks: int) -> int:
    """Tokens of a sequence that fills `blocks` blocks."""
    return blocks * _BLOCK_TOKENS


def block_bytes(sizes: ModelSizes) -> int:
    """Bytes of one block in all layers."""
    return _BLOCK_TOKENS * sizes.token_kv

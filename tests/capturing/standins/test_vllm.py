"""vLLM beside a training: what its stand-in takes of the card, by arithmetic of its own."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.estimation import estimate
from memplan.estimation.engines import stage_peaks
from memplan.estimation.interval import CachingPlayer, find_interval
from memplan.layout.static_plan import static_plan
from memplan.simulate import AllocatorSettings, Settled
from memplan.simulate.repeat import find_round, repeated
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError, NoAnswerError
from memplan.types.estimate import Estimate
from memplan.types.trace import OUTSIDE, EventKind, Role, Trace
from memplan.types.trace_file import load_trace, save_trace

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"
)

GIB, MIB = 1 << 30, 1 << 20
LAYERS, WIDTH, INNER, VOCABULARY, HEADS, KEYS = 2, 64, 128, 1000, 4, 2
HEAD = WIDTH // HEADS
LONGEST = 2048
CARD = find_profile("24GiB:sm86")
_ATTENTION = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS * HEAD + (HEADS + 2 * KEYS) * HEAD
WEIGHTS = 2 * (  # half precision: the embedding, tied, in rows of 64, and the rotary table
    1024 * WIDTH + LAYERS * (_ATTENTION + 3 * WIDTH * INNER + 2 * WIDTH) + WIDTH + LONGEST * HEAD
)
BLOCK = 16 * LAYERS * 2 * KEYS * HEAD * 2
SHARE = 0.25


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(job: Callable[[], object], steps: int | None = None) -> Trace:
    options = CaptureOptions(profile=CARD, steps=steps)
    with CaptureSession(options) as session, suppress(EnoughSeen):
        job()
    return session.trace()


def engine(model: str, **settings: Any) -> Any:
    from vllm import LLM  # type: ignore[import-not-found]

    settings = {
        "gpu_memory_utilization": SHARE,
        "distributed_executor_backend": "external_launcher",
        **settings,
    }
    return LLM(model, **settings)


def held(trace: Trace, part: str) -> list[tuple[int, int, int, int]]:
    """Low, expected and high bytes, and the stream, of each time that a part is taken; each layer
    has its piece of the KV cache."""
    events = trace.events
    pieces = LAYERS if part == "kv_cache" else 1
    found = [
        (int(events.bytes_low[e.index]), e.bytes, int(events.bytes_high[e.index]), e.stream)
        for e in trace
        if e.kind == EventKind.ALLOC
        and trace.strings[trace.storages.name[e.storage]] == f"vllm.{part}"
    ]
    assert len(set(found)) <= 1, "pieces are alike, and so is each time"
    return [
        (low * pieces, expected * pieces, high * pieces, stream)
        for low, expected, high, stream in found[::pieces]
    ]


def answer(trace: Trace) -> Estimate:
    return estimate(trace, CARD)


def test_an_engine_fills_its_share_of_the_card(model: str) -> None:
    trace = run(lambda: engine(model))
    [(_, weights, _, stream)] = held(trace, "weights")
    [kv] = held(trace, "kv_cache")
    [graphs] = held(trace, "graphs")
    requested = CARD.total_memory_bytes // 4
    # The profile run: 8,192 tokens through a layer, or 256 requests' logits in the sampler.
    activations = max(8192 * (2 * WIDTH + 3 * INNER) * 2, 256 * VOCABULARY * 22)
    assert weights == WEIGHTS
    assert stream == 0, "in the process it is PyTorch's allocator that is asked"
    assert kv[1] % BLOCK == 0
    assert 0 <= requested - (WEIGHTS + activations + graphs[1] + kv[1]) < BLOCK
    assert kv[0] < kv[1] <= kv[2]
    found = answer(trace)
    assert found.breakdown.engine == WEIGHTS + kv[1] + graphs[1]
    assert abs(found.peak_bytes - CARD.context_bytes - requested) < activations + 64 * MIB
    assert found.reserved_peak_bytes == found.peak_bytes - CARD.context_bytes


def test_an_engine_without_graphs_has_the_more_for_its_cache(model: str) -> None:
    [with_graphs] = held(run(lambda: engine(model)), "kv_cache")
    trace = run(lambda: engine(model, enforce_eager=True))
    [without] = held(trace, "kv_cache")
    assert held(trace, "graphs") == [(0, 0, 0, held(trace, "graphs")[0][3])]
    assert without[1] > with_graphs[1]
    activations = 8192 * (2 * WIDTH + 3 * INNER) * 2
    assert 0 <= CARD.total_memory_bytes // 4 - WEIGHTS - activations // 2 - without[2] < BLOCK


def test_a_sleeping_engine_gives_its_pool_back_to_the_card(model: str) -> None:
    free: list[int] = []

    def job() -> None:
        def look() -> None:
            free.append(torch.cuda.mem_get_info()[0])

        llm = engine(model, enable_sleep_mode=True, enforce_eager=True)
        look()
        llm.sleep(level=2)
        look()
        llm.wake_up(tags=["weights"])
        look()
        llm.wake_up(tags=["kv_cache"])
        look()

    trace = run(job)
    [kv, _] = held(trace, "kv_cache")
    assert {stream >= OUTSIDE for _, _, _, stream in [*held(trace, "weights"), kv]} == {True}
    assert free[1] - free[0] == WEIGHTS + kv[1]
    assert free[1] - free[2] == WEIGHTS
    assert free[3] == free[0]
    found = answer(trace)
    assert found.reserved_peak_bytes < 64 * MIB, "the pool is not the allocator's"
    assert found.peak_bytes > CARD.total_memory_bytes // 4 - 64 * MIB


def test_level_one_keeps_the_weights_in_page_locked_memory(model: str) -> None:
    def job(level: int) -> Trace:
        def nap() -> None:
            llm = engine(model, enable_sleep_mode=True)
            llm.sleep(level=level)
            llm.wake_up()
            nn.Linear(4, 4, device="cuda")

        return run(nap)

    pinned = [answer(job(level)).host_pinned_peak_bytes for level in (1, 2)]
    assert pinned[0] is not None and pinned[0] >= WEIGHTS
    assert not pinned[1]


def test_an_engine_in_a_process_of_its_own_has_a_context_there(model: str) -> None:
    trace = run(lambda: engine(model, distributed_executor_backend=None))
    assert all(stream >= OUTSIDE for *_, stream in held(trace, "kv_cache"))
    found = answer(trace)
    assert found.engines[0].separate
    assert found.breakdown.context == CARD.context_bytes
    requested = CARD.total_memory_bytes // 4
    assert found.breakdown.engine <= requested + CARD.context_bytes
    assert found.breakdown.engine > requested + CARD.context_bytes - 128 * MIB


def test_an_engine_that_is_dropped_holds_nothing(model: str) -> None:
    def job() -> None:
        llm = engine(model)
        del llm
        gc.collect()
        nn.Linear(4, 4, device="cuda")

    trace = run(job)
    ends = [e for e in trace if e.kind == EventKind.FREE and e.storage >= 0]
    roles = [trace.storages.role[e.storage] for e in ends]
    assert roles.count(Role.ENGINE) == 2 + LAYERS


@pytest.mark.parametrize("ask", [{"prompt_token_ids": [1, 2, 3]}, [1, 2, 3]])
def test_completions_are_as_long_as_they_may_be(model: str, ask: Any) -> None:
    def job() -> None:
        from vllm import SamplingParams

        llm = engine(model)
        params = SamplingParams(n=2, max_tokens=50, logprobs=3, temperature=0.5)
        [output] = llm.generate(ask, params)
        assert output.prompt_token_ids == [1, 2, 3]
        assert len(output.outputs) == 2
        for completion in output.outputs:
            assert len(completion.token_ids) == len(completion.logprobs) == 50
            assert all(0 <= token < VOCABULARY for token in completion.token_ids)
            assert all(
                token in beside and len(beside) == 3
                for token, beside in zip(completion.token_ids, completion.logprobs, strict=True)
            )
        [output] = llm.generate(ask, SamplingParams(max_tokens=None))
        assert len(output.outputs[0].token_ids) == LONGEST - 3
        assert output.outputs[0].logprobs is None

    assert [stage.name for stage in run(job).meta.stages] == [
        "engine start", "generation", "generation"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        (({"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}), 2),
        (np.array([[1, 2, 3], [4, 5, 6]]), 2),
        (([1, 2], [3]), 2),
        ((1, 2, 3), 1),
        (np.array([1, 2, 3]), 1),
        ([], 0),
    ],
)
def test_every_sequence_of_prompts_is_several(model: str, prompts: Any, count: int) -> None:
    def job() -> None:
        from vllm import SamplingParams

        llm = engine(model, enforce_eager=True)
        for params in (None, tuple(SamplingParams(max_tokens=5) for _ in range(count))):
            found = llm.generate(prompts, params)
            assert len(found) == count
            assert all(type(token) is int for one in found for token in one.prompt_token_ids)

    run(job)


def test_every_sequence_of_conversations_is_several(model: str) -> None:
    talk = [{"role": "user", "content": "one"}]

    def job() -> None:
        llm = engine(model, enforce_eager=True)
        llm._tokenizer = SimpleNamespace(
            apply_chat_template=lambda asked, **_: f"{[one['role'] for one in asked]}",
        )
        llm._prompt = lambda prompt: (prompt["prompt"], [1])
        for asked, count in ((talk, 1), (tuple(talk), 1), ((talk, talk), 2), ([tuple(talk)], 1)):
            assert [one.prompt for one in llm.chat(asked)] == ["['user']"] * count

    run(job)


def test_what_vllm_refuses_fails_here_too(model: str) -> None:
    def job() -> None:
        for share in (0.0, -0.5, 1.5):
            with pytest.raises(ValueError, match="gpu_memory_utilization"):
                engine(model, gpu_memory_utilization=share)
        with pytest.raises(ValueError, match="No available memory for the cache blocks"):
            engine(model, gpu_memory_utilization=0.0001)
        with pytest.raises(ValueError, match="GiB KV cache is needed"):
            engine(model, gpu_memory_utilization=0.001, max_num_seqs=8, max_model_len=1 << 21)
        with pytest.raises(ValueError, match="Sleep mode is not enabled"):
            engine(model).sleep()
        taken = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
        with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
            engine(model, gpu_memory_utilization=0.5)
        del taken

    run(job)


@pytest.mark.parametrize(
    ("setting", "tokens"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("0.5K", 512),
        ("800", 800),
        (None, LONGEST),
        (-1, LONGEST),
        ("auto", LONGEST),
    ],
)
def test_lengths_in_the_forms_that_vllm_takes(
    model: str, tmp_path: Path, setting: Any, tokens: int
) -> None:
    def job() -> None:
        llm = engine(model, max_model_len=setting, gpu_memory_utilization=str(SHARE))
        assert llm.llm_engine.model_config.max_model_len == tokens

    trace = run(job)
    assert trace.meta.engines[0].share == SHARE
    save_trace(trace, tmp_path / "job.trace")
    assert load_trace(tmp_path / "job.trace").meta.engines == trace.meta.engines


def test_a_length_that_fits_is_cut_to_the_cache(model: str) -> None:
    room = BLOCK * 10

    def job() -> None:
        llm = engine(model, max_model_len="auto", kv_cache_memory_bytes=room + 1)
        assert llm.llm_engine.model_config.max_model_len == 160

    trace = run(job)
    assert any("160 of the model's 2,048" in one.text for one in trace.meta.assumptions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_model_len", value) for value in ("x", "", "1.5", "1kk", "-2", -2, 0, 2.5, [1])),
        *(("gpu_memory_utilization", value) for value in ("x", "nan", None, "1.5", [1])),
    ],
)
def test_settings_that_vllm_refuses_are_refused_by_name(model: str, name: str, value: Any) -> None:
    def job() -> None:
        with pytest.raises(ValueError, match=f"^{name}: .* should be a"):
            engine(model, **{name: value})

    run(job)


@pytest.mark.parametrize(
    "setting", [{"tensor_parallel_size": 2}, {"quantization": "awq"}, {"enable_lora": True}]
)
def test_what_is_not_followed_is_named(model: str, setting: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match="cannot be captured"):
        run(lambda: engine(model, **setting))


def training(hold: int) -> None:
    """Three steps that need `hold` bytes."""
    weight = nn.Parameter(torch.empty(1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        kept = torch.empty(hold, dtype=torch.uint8, device="cuda")
        (weight * 2).sum().backward()
        optimizer.step()
        del kept


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_largest_share_is_the_last_that_fits(model: str, sleeps: bool) -> None:
    def job(share: float) -> Trace:
        def both() -> None:
            llm = engine(model, gpu_memory_utilization=share, enable_sleep_mode=sleeps)
            for _ in range(2):
                if sleeps:
                    torch.cuda.empty_cache()
                    llm.sleep(level=2)
                training(10 * GIB)
                if sleeps:
                    torch.cuda.empty_cache()
                    llm.wake_up()

        return run(both, steps=5)

    found = answer(job(SHARE))
    [one] = found.engines
    assert one.largest_share is not None and found.fits
    # 10 GiB and their margin of 4 %, the context: asleep the engine leaves all of that free.
    expected = 0.98 if sleeps else (24 - 10.4 - CARD.context_high_bytes / GIB) / 24
    assert one.largest_share == pytest.approx(expected, abs=0.04)
    at, beyond = answer(job(one.largest_share)), answer(job(round(one.largest_share + 0.01, 2)))
    assert at.fits, "the share that was named fits when the job is captured with it"
    assert not beyond.fits


def test_each_engine_of_a_job_has_its_own_cache_and_share(model: str) -> None:
    def job(*shares: float) -> Estimate:
        def both() -> None:
            kept = [engine(model, gpu_memory_utilization=share) for share in shares]
            training(2 * GIB)
            del kept

        return answer(run(both))

    found = job(0.2, 0.4)
    assert [one.name for one in found.engines] == ["vllm", "vllm-2"]
    first, second = (one.kv_cache_bytes / CARD.total_memory_bytes for one in found.engines)
    assert second - first == pytest.approx(0.2, abs=0.01)
    largest = found.engines[0].largest_share
    assert largest is not None
    assert job(largest, 0.4).fits, "the other engine keeps its share"
    assert not job(round(largest + 0.01, 2), 0.4).fits


def test_a_vllm_that_is_no_stand_in_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("not counted" in note for note in run(lambda: engine(model)).meta.notes)
    (tmp_path / "vllm.py").write_text("def LLM(*_args, **_settings): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = CaptureOptions(profile=CARD, packages=("vllm",))
    try:
        with CaptureSession(options) as session:
            engine(model)
            nn.Linear(4, 4, device="cuda")
        notes = session.trace().meta.notes
    finally:
        sys.modules.pop("vllm", None)
    assert any(f"vllm of {tmp_path / 'vllm.py'} is used" in note for note in notes)
    assert any("not counted" in note for note in notes)


def test_the_share_of_another_card_is_not_this_ones(model: str) -> None:
    trace = run(lambda: engine(model))
    assert not any("share of vllm" in note for note in answer(trace).notes)
    elsewhere = estimate(trace, find_profile("h100"))
    assert any("share of vllm" in note for note in elsewhere.notes)
    assert elsewhere.engines[0].largest_share is None
    nowhere = estimate(trace)
    assert nowhere.engines[0].largest_share is None and not nowhere.engines[0].why


def test_where_no_share_fits_the_answer_says_why(model: str) -> None:
    def job() -> None:
        engine(model)
        training(23 * GIB)

    [one] = answer(run(job)).engines
    assert one.largest_share is None
    assert "does not fit beside the training" in one.why


def test_each_stage_has_a_peak_of_its_own(model: str) -> None:
    def job() -> None:
        llm = engine(model, enable_sleep_mode=True)
        llm.sleep(level=2)
        for _ in range(2):
            training(2 * GIB)
            torch.cuda.empty_cache()
            llm.wake_up(tags=["weights"])
            with pytest.raises(RuntimeError, match="sleeps"):
                llm.generate([{"prompt_token_ids": [1]}])
            llm.wake_up(tags=["kv_cache"])
            llm.generate([{"prompt_token_ids": [1]}])
            llm.sleep(level=2)

    found = answer(run(job, steps=5))
    peaks = {one.stage: one for one in found.stages}
    requested = CARD.total_memory_bytes // 4
    assert list(peaks) == ["engine start", "generation", "weight sync", "training"]
    assert peaks["generation"].engine_bytes > requested - 128 * MIB
    assert peaks["weight sync"].engine_bytes < 64 * MIB
    assert peaks["training"].engine_bytes < 64 * MIB, "the graphs stay"
    assert 2 * GIB < peaks["training"].peak_bytes < 3 * GIB
    assert peaks["generation"].peak_bytes == pytest.approx(
        requested + CARD.context_bytes, abs=192 * MIB
    )
    assert max(one.peak_bytes for one in found.stages) == found.peak_bytes
    kept = {stage: one.peak_bytes - one.in_use_bytes for stage, one in peaks.items()}
    assert all(0 <= nbytes < 64 * MIB for nbytes in kept.values())


def test_no_addresses_are_planned_beside_an_engine(model: str) -> None:
    def job() -> None:
        llm = engine(model)
        training(GIB)
        del llm

    with pytest.raises(NoAnswerError, match="inference engine"):
        static_plan(run(job))


def test_steps_that_are_simulated_have_the_stages_of_those_they_repeat(model: str) -> None:
    def job() -> None:
        llm = engine(model, enable_sleep_mode=True)
        llm.sleep(level=2)
        weight = nn.Parameter(torch.empty(1024, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(6):
            torch.cuda.empty_cache()
            llm.wake_up()
            llm.generate([1, 2, 3])
            llm.sleep(level=2)
            (weight * 2).sum().backward()
            optimizer.step()

    trace = run(job)
    found = find_round(trace)
    assert found is not None and found.recurs
    longer, captured = repeated(trace, found, 5)
    settings = AllocatorSettings()
    player = CachingPlayer(settings, CARD, CARD.total_memory_bytes)
    peaks = [
        stage_peaks(Settled(one, origin), find_interval(one, CARD, player, limited=True), CARD)
        for one, origin in ((trace, None), (longer, captured))
    ]
    assert len(longer) > 2 * len(trace)
    assert [(one.stage, one.peak_bytes, one.engine_bytes) for one in peaks[0]] == [
        (one.stage, one.peak_bytes, one.engine_bytes) for one in peaks[1]
    ]
    # However little is likely to be reserved, what is in use is part of it.
    interval = find_interval(trace, CARD, player, limited=True)
    less = replace(interval, held=(0, 0, interval.held[2]))
    stages = stage_peaks(Settled(trace), less, CARD)
    assert all(one.peak_bytes == one.in_use_bytes for one in stages)

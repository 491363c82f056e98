"""Values that only the device would know: known from real data, else assumed and said so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from memplan.capturing.known_values import answers
from memplan.types.errors import CaptureError
from memplan.types.trace import Role
from tests.capturing.jobs import allocations, assumed, bytes_of, record, sizes

ROWS, WIDTH = 32, 64


def scores() -> torch.Tensor:
    """Values that cannot be known."""
    return torch.randn(ROWS, WIDTH, device="cuda")


def test_a_check_that_a_flag_equals_true_is_answered_as_the_flag() -> None:
    def job() -> None:
        window = torch.hann_window(ROWS, device="cuda")
        sound = scores().view(1, -1)
        spectrum = torch.stft(sound, ROWS, window=window, return_complex=True)
        assert torch.istft(spectrum, ROWS, window=window).shape == sound.shape
        small = (scores() < 0.0).any()
        answered = [torch.equal(torch.full_like(small, flag), small) for flag in (True, False)]
        assert answered == [False, True]
        assert torch.equal(small, torch.ones_like(small))
        several = [torch.equal(scores() < 0.0, torch.tensor(flag).cuda()) for flag in (True, False)]
        assert several == [False, False]

    record(job)


# Known values


def test_values_of_real_data_are_known_on_the_device() -> None:
    def job() -> None:
        lengths = torch.tensor([3, 5, 2]).cuda()
        assert lengths.max().item() == 5
        assert lengths.sum().item() == 10
        mask = torch.arange(5, device="cuda")[None] < lengths[:, None]
        assert mask.sum().item() == 10
        assert mask.nonzero().shape == (10, 2)
        assert torch.unique(torch.tensor([1, 1, 4]).to("cuda")).tolist() == [1, 4]
        ids = torch.tensor([0, 2, 2, 1], device="cuda")
        assert torch.bincount(ids).tolist() == [1, 1, 2]
        assert F.one_hot(ids).shape == (4, 3)
        ids[0] = 2
        assert (ids == 2).sum().item() == 3
        assert torch.equal(ids, ids.clone())
        assert np.asarray(ids.cpu()).tolist() == [2, 2, 2, 1]

    assert list(record(job).meta.assumptions) == []


def test_a_write_of_something_unknown_is_not_forgotten() -> None:
    def job() -> None:
        known = torch.zeros(4, device="cuda")
        known[1:3] += scores()[0, :2]
        known.sum().item()

    assert any(text.startswith("value") for text in assumed(record(job)))


def test_what_one_operand_decides_is_known() -> None:
    """As transformers' generation ends at its greatest length, whatever the tokens."""

    def job() -> None:
        unknown = scores().argmax(dim=1)[:3] == 7
        none, all_ = (torch.full((3,), flag, device="cuda") for flag in (False, True))
        assert (unknown | all_).tolist() == (all_ | unknown).tolist() == [True] * 3
        assert (unknown & none).tolist() == torch.logical_and(none, unknown).tolist() == [False] * 3
        unfinished = torch.ones(3, dtype=torch.long, device="cuda") & ~unknown
        assert (unfinished & ~(unknown | all_)).max().item() == 0
        unfinished &= none
        assert unfinished.tolist() == [0, 0, 0]
        rounds = 0
        finished = False
        while not finished:
            rounds += 1
            done = unknown | torch.full((3,), rounds >= 40, device="cuda")
            finished = bool((unfinished | (1 - done.long())).max() == 0)
        assert rounds == 40

    record(job, steps=0)


def test_what_one_operand_leaves_open_is_not_known() -> None:
    def job() -> None:
        unknown = scores().argmax(dim=1)[:3] == 7
        some = torch.tensor([True, False, True], device="cuda")
        known = torch.ones(3, dtype=torch.bool, device="cuda")
        known &= unknown
        for open_ in (unknown & some, unknown | some, known):
            if open_.all():
                pass

    asked = [one for one in record(job, steps=0).meta.assumptions if "condition" in one.text]
    assert sum(one.count for one in asked) == 3


def test_conditions_on_a_healthy_loss() -> None:
    """Nothing is NaN or infinite, everything is finite."""

    def job() -> None:
        loss = scores().mean()
        assert not torch.isnan(loss)
        assert not torch.isinf(loss).any()
        assert torch.isfinite(loss).all()
        assert not math.isnan(loss.item())
        assert torch.allclose(scores(), scores())
        asked = [torch.isfinite(loss), loss.isfinite(), torch.isnan(loss), loss != loss]
        assert [bool(answer) for answer in asked] == [True, True, False, False]
        torch.distributions.Normal(scores(), scores().exp()).sample()

    record(job)


def test_a_condition_made_of_others_says_what_they_say() -> None:
    """Outside of a check, too, where nothing but its origin tells: a step is not skipped."""
    said: list[bool] = []

    def job() -> None:
        loss, known = scores().mean(), torch.tensor(True).cuda()
        sound, bad = torch.isfinite(loss), torch.isnan(loss)
        holds = [sound, ~bad, ~torch.isinf(loss), ~torch.isnan(scores()).any(), sound.cpu()]
        holds += [sound & ~bad, bad | sound, known & sound, torch.logical_not(~sound)]
        said.extend(bool(one) for one in holds)
        fails = [~sound, bad, torch.isinf(loss), bad & sound, known & bad, bad | ~sound]
        said.extend(not one for one in fails)

    record(job, steps=0)
    assert all(said), said


def test_numbers_that_nobody_knows_are_not_zero() -> None:
    """Prodigy keeps a copy of parameters that are not zero."""
    said: list[bool] = []

    def job() -> None:
        said.extend([bool(scores().any()), bool((scores() > 9).any())])

    record(job, steps=0)
    assert said == [True, False]


def test_a_mask_selects_something_where_more_is_done_for_it() -> None:
    """As the points that a ray meets, and the anchors that match a box."""
    done: list[str] = []

    def job() -> None:
        mask = scores() > 0
        if mask.any():
            done.append("in the body")
        if mask.any():
            return
        if mask.any() and not done:
            done.append("not asked")
        for _ in range(2):
            if mask.any():
                done.append("leaves")
                continue
            done.append("goes on")
        if mask.any():
            done.append("one")
        else:
            done.append("other")
        if not mask.any():
            return  # a first attempt was good enough, as a Cholesky factor without errors
        done.append("again")

    record(job, steps=0)
    assert done == ["in the body", "goes on", "goes on", "other"]


def test_real_values_are_compared_for_real() -> None:
    def job() -> None:
        items = torch.arange(8.0).cuda()
        found = [torch.allclose(items, items + 1), torch.allclose(items, items.clone())]
        assert found == [False, True]

    assert list(record(job).meta.assumptions) == []


def test_whether_two_tensors_are_one_view_is_known() -> None:
    def job() -> None:
        weight = scores()
        again, part, copy = weight.detach(), weight[1:], weight.clone()
        assert [weight.is_set_to(other) for other in (again, part, copy)] == [True, False, False]

    assert list(record(job).meta.assumptions) == []


# Shapes that depend on data


@pytest.mark.parametrize(("routing", "share"), [("balanced", 2), ("worst", 1)])
def test_an_unknown_mask_selects_a_declared_share(routing: str, share: int) -> None:
    def job() -> None:
        x = scores()
        chosen = x[x > 0]
        assert chosen.shape == (ROWS * WIDTH // share,)
        x[x < 0] = 0.0
        assert torch.masked_select(x, x > 1).shape == chosen.shape
        assert torch.where(x > 2)[0].shape == chosen.shape

    trace = record(job, routing=routing)
    assert any("mask" in text for text in assumed(trace))
    assert all("test_device_values.py:" in item.source for item in trace.meta.assumptions)


class Mixture(nn.Module):
    """Experts in a Python loop, as in Mixtral and Qwen-MoE."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(experts))
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, indices = torch.topk(self.router(x).softmax(-1), self.chosen)
        mask = F.one_hot(indices, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize(
    ("routing", "tokens"), [("balanced", [16] * 4), ("worst", [ROWS, ROWS, 0, 0])]
)
def test_routing_of_a_mixture_of_experts(routing: str, tokens: list[int]) -> None:
    trace = record(lambda: Mixture(4, 2).cuda()(scores()), routing=routing)
    products = [
        event.bytes // (4 * WIDTH)
        for event in allocations(trace, op="mm")
        if ".experts." in event.module
    ]
    assert products == [count for count in tokens if count]
    assert any(text.startswith("routing") for text in assumed(trace))


# Loops and readings


def test_counted_values_lie_below_the_length_that_is_asked_for() -> None:
    """Confusion matrices of metrics count pairs of classes."""

    def job() -> None:
        chosen = scores().argmax(1)
        pairs = (chosen % 4) * 4 + chosen % 4
        assert torch.bincount(pairs, minlength=16).reshape(4, 4).dtype is torch.int64
        weighed = torch.bincount(pairs, torch.rand(ROWS, device="cuda"), minlength=16)
        assert (weighed.shape, weighed.dtype) == ((16,), torch.float32)

    assert any("below `minlength`" in text for text in assumed(record(job)))


def test_chosen_positions_are_no_more_than_there_are_places() -> None:
    """Metrics look whether there are more classes among the predictions than there should be."""
    lengths = []

    def job() -> None:
        for chosen in (scores()[:, :4].argmax(1), scores()[:, :5].max(1).indices):
            lengths.append(len(torch.unique(chosen.view(4, -1))))
        moved = scores()[:, :4].argmin(1)
        moved += scores().argmax(1)
        lengths.append(len(torch.unique(moved)))

    record(job)
    assert lengths == [4, 5, ROWS]


def test_rows_of_a_mask_are_assumed_one_by_one() -> None:
    """As trl takes each completion up to its end, on the device and on the host."""
    taken: list[list[int]] = []

    def job() -> None:
        ends = scores().argmax(dim=1)[:3]
        mask = torch.arange(WIDTH, device="cuda").expand(3, -1) <= ends.unsqueeze(1)
        rows = [row[held] for row, held in zip(scores()[:3], mask, strict=True)]
        taken.append([len(row) for row in rows])
        on_host = zip(torch.ones(3, WIDTH), mask.cpu(), strict=True)
        taken.append([len(row[held]) for row, held in on_host])

    record(job)
    assert taken == [[WIDTH // 2] * 3] * 2


def test_a_loop_without_an_optimizer_ends() -> None:
    rounds: Counter[str] = Counter()

    def job() -> None:
        error = scores().norm()
        while error.item() > 1e-6:
            error = error * 0.5
            rounds["number"] += 1
        while error >= 1e-6:
            error = error * 0.5
            rounds["condition"] += 1

    trace = record(job)
    assert rounds == {"number": 16, "condition": 16}
    loops = [item.text for item in trace.meta.assumptions if item.kind == "loop"]
    assert loops == ["a loop on a device value ends after 16 rounds"] * 2


def test_a_loop_inside_another_runs_once_after_a_few_times() -> None:
    """As a solver's steps between the times that are asked for."""
    steps: list[int] = []

    def job() -> None:
        for _ in range(18):
            time, taken = scores().norm(), 0
            while time < 1.0:
                time, taken = time * 2.0, taken + 1
            steps.append(taken)

    record(job)
    assert steps == [16] * 16 + [1] * 2


class Halting(nn.Module):
    """Repeats a layer until the device says that it is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rounds = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.norm() > 1.0:
            x = self.layer(x)
            self.rounds += 1
        return x


def test_a_loop_inside_a_model_runs_a_few_times() -> None:
    def job() -> None:
        model = Halting().cuda()
        model(scores()), model(scores())
        assert model.rounds == 8

    assert any("ends after 4 rounds" in text for text in assumed(record(job)))


def test_a_solver_that_takes_steps_back_comes_to_its_end() -> None:
    """While every step is taken back, the time is known, and the loop has no end."""
    steps: Counter[str] = Counter()

    def advance(time: torch.Tensor) -> torch.Tensor:
        error = scores().norm()
        if error <= 1.0:
            steps["kept"] += 1
            time = time + 1.0 / error
        else:
            steps["taken back"] += 1
        return time

    def job() -> None:
        time, end = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
        while end > time:
            time = advance(time)

    record(job)
    assert steps["taken back"] < 40
    assert steps["kept"] > 1


@pytest.mark.parametrize("number", [False, True])
def test_a_loop_that_may_break_does_once_its_turns_are_alike(number: bool) -> None:
    """As a solver by conjugate gradients, which need not run all of its iterations."""
    turns = []

    def job() -> None:
        for _ in range(3):
            x = scores()
            for turn in range(1000):  # noqa: B007
                x = x * 0.5
                if (x.norm().item() if number else x.norm()) < 1e-6:
                    break
            turns.append(turn)

    trace = record(job)
    first, *later = turns
    assert first <= answers._ALIKE + 2
    assert max(later) <= answers._ROUNDS + 2
    loops = [item.text for item in trace.meta.assumptions if item.kind == "loop"]
    assert "a loop that may break on a device value does after 128 turns alike" in loops


def test_a_loop_that_keeps_memory_does_not_break_early() -> None:
    kept = []

    def job() -> None:
        x = scores()
        for _ in range(400):
            kept.append(x * 0.5)
            if kept[-1].norm() < 1e-6:
                break

    record(job)
    assert len(kept) == 400


def test_a_search_inside_a_training_step_ends_every_time() -> None:
    found = []

    def job() -> None:
        model = nn.Linear(WIDTH, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(9):
            rate, rounds = scores().norm(), 0
            while rate > 1.0:
                rate, rounds = rate / 2, rounds + 1
            found.append(rounds)
            model(scores()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    record(job)
    assert found == [16, 16, 16]


def test_a_loop_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_LIMIT", 2_000)

    def job() -> None:
        while True:
            scores().sum().item()

    with pytest.raises(CaptureError, match=r"test_device_values\.py:\d+: asked 2,001 times"):
        record(job)


def test_reading_tensors_back() -> None:
    def job() -> None:
        x = scores()
        assert len(x.tolist()) == ROWS
        assert x.detach().cpu().numpy().shape == (ROWS, WIDTH)
        assert isinstance(float(x.mean()), float)
        assert f"{x.mean():.3f}" == "1.000"
        assert "cuda" in str(x)
        assert max(x[0, 0], x[0, 1]).shape == ()
        assert len(list(x)) == ROWS
        host = torch.empty(ROWS, WIDTH)
        host.copy_(x)
        with pytest.raises(TypeError, match="convert cuda"):
            x.numpy()

    trace = record(job)
    assert any(item.kind == "value" for item in trace.meta.assumptions)


SHAPES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "argmax": (lambda x: x.argmax(1), (ROWS,)),
    "topk": (lambda x: x.topk(3)[0], (ROWS, 3)),
    "sort": (lambda x: x.sort()[1], (ROWS, WIDTH)),
    "multinomial": (lambda x: torch.multinomial(x.abs(), 5), (ROWS, 5)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), (ROWS, WIDTH)),
    "median": (lambda x: x.median(), ()),
    "quantile": (lambda x: x.quantile(0.5), ()),
    "searchsorted": (lambda x: torch.searchsorted(x[0], x[1]), (WIDTH,)),
    "scatter": (lambda x: x.scatter(0, x[:1].long(), 1.0), (ROWS, WIDTH)),
    "index": (lambda x: x[torch.randint(0, ROWS, (5,), device="cuda")], (5, WIDTH)),
    "host index": (lambda x: x[torch.tensor([1, 2])], (2, WIDTH)),
    "host mask": (lambda x: x[torch.tensor([True] + [False] * (ROWS - 1))], (1, WIDTH)),
    "repeats": (
        lambda x: torch.repeat_interleave(x, torch.full((ROWS,), 2, device="cuda"), 0),
        (2 * ROWS, WIDTH),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_results_have_their_shape(name: str) -> None:
    operator, shape = SHAPES[name]

    def job() -> None:
        result = operator(scores())
        assert tuple(result.shape) == shape
        assert result.device == torch.device("cuda", 0)

    record(job)


def test_an_index_costs_what_it_selects() -> None:
    trace = record(lambda: scores()[torch.tensor([1, 2], device="cuda")])
    assert sizes(trace, op="index.")[-1] == 2 * WIDTH * 4
    assert bytes_of(trace, Role.PARAMETER) == 0


def test_constants_have_known_values() -> None:
    """As a router makes its map of tokens and experts."""

    def job() -> None:
        tokens, experts, chosen = 4096, 8, 2
        logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
        probabilities, top = torch.topk(logits, chosen, dim=1)
        by_scatter = torch.zeros_like(logits).int().scatter(1, top, 1).bool()
        by_index = torch.zeros_like(logits)
        rows = torch.arange(tokens, device="cuda").unsqueeze(1)
        by_index.index_put_((rows, top), torch.ones_like(probabilities))
        for routed in (by_scatter, by_index.bool()):
            assert routed.sum(dim=0).tolist() == [tokens * chosen // experts] * experts
        assert torch.full_like(logits[0], 3).long().tolist() == [3] * experts
        assert logits.new_ones(2).sum().item() == 2
        buffer = torch.empty(3, dtype=torch.long, device="cuda")
        assert buffer.fill_(7).tolist() == [7] * 3
        assert buffer.zero_().tolist() == [0] * 3
        buffer[1:].fill_(2)
        assert buffer.tolist() == [0, 2, 2]

    record(job)


def test_ones_like_a_large_float_tensor_are_known() -> None:
    """As where speech has no attention mask: its lengths are those of the padded batch."""

    def job() -> None:
        sound = torch.randn(8, 160_000, device="cuda")
        mask = torch.ones_like(sound, dtype=torch.long)
        assert mask.sum(-1).tolist() == [160_000] * 8

    record(job)


def test_memory_as_it_is_found_is_not_known() -> None:
    """Beside a known tensor, and what a GRU's cell makes of known states."""

    def job() -> None:
        known = torch.arange(8.0, device="cuda")
        made = [known.new_empty(8), torch.empty_like(known)]
        cell = torch.nn.GRUCell(8, 8).cuda()
        made.append(cell(known[None], torch.zeros(1, 8, device="cuda")))
        assert all(one.detach().flatten().tolist() == [1.0] * 8 for one in made)

    assert len({item.text for item in record(job).meta.assumptions}) == 1

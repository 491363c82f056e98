"""Frozen weights on the host: the same bits, whatever the model and the loop do with them.

There is no card here: weights and their copies are both on the CPU, which is the device.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memplan.runtime import host_buffers
from memplan.runtime.frozen import FrozenWeights, in_effect, weight
from memplan.runtime.frozen.weight import Weight
from memplan.runtime.in_effect import plan_in_effect
from memplan.types.op_names import FETCH
from memplan.types.plan import FrozenPart, Plan
from tests.runtime.harness import Job, Spy, check, choices, recomputations, recorded, same_bits

WIDTH = 24
M = TypeVar("M", bound=nn.Module)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_effect, "SMALLEST", 500)


@contextmanager
def applied(share: float = 1.0, ahead: int = 1 << 20) -> Iterator[tuple[FrozenWeights, list[str]]]:
    said: list[str] = []
    part = FrozenPart(share=share, ahead_bytes=ahead)
    with FrozenWeights(part, said.append, devices=("cpu",)) as lever:
        yield lever, said


def frozen(module: M) -> M:
    return module.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(WIDTH, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Adapted(), Adapted()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Tied(nn.Module):
    """Embeddings, frozen, are the head's weight too; one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = frozen(nn.Embedding(50, WIDTH))
        self.layer = Adapted()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.abs().sum(-1) * 1000).long() % 50
        logits: Tensor = self.head(self.layer(self.layer(self.embed(rows))))
        return logits


class Trunk(nn.Module):
    """Convolutions are frozen; batch norms train and keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = frozen(nn.Conv2d(3, 16, 3)), frozen(nn.Conv2d(16, 16, 3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1)[: 8 * 3 * 8].repeat(8, 1).view(8, 3, 8, 8)
        y = torch.relu_(self.norms[0](self.first(x)))
        y = torch.relu_(self.norms[1](self.second(y)))
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Reads the weight of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = frozen(nn.MultiheadAttention(WIDTH, 2, batch_first=True))
        self.layer = Adapted()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)[None]
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapted": lambda: nn.Sequential(*(Adapted() for _ in range(4))),
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "tied": Tied,
    "trunk": Trunk,
    "attention": Attention,
}

ON_HOST = {
    "adapted": 4,
    "checkpointed": 6,
    "checkpointed, reentrant": 6,
    "tied": 2,
    "trunk": 2,
    "attention": 2,
}


def train(model: nn.Module, between: Callable[[int], object] = lambda step: None) -> list[Tensor]:
    """All that three steps leave."""
    seen = []
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().train()


def on_host(lever: FrozenWeights) -> int:
    return sum(1 for _ in lever.weights())


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ahead", [0, 3000, 1 << 20])
def test_the_same_bits(name: str, ahead: int) -> None:
    plain = train(made(name))
    for share, count in ((0.5, ON_HOST[name] // 2), (1.0, ON_HOST[name])):
        with applied(share, ahead) as (lever, said):
            model = made(name)
            assert same(train(model), plain)
            assert on_host(lever) == count and not said
        twin = copy.deepcopy(model)
        assert same(train(model), train(twin))  # what is on the host can be used


def adapted_decoder() -> nn.Module:
    """A decoder of Transformers with adapters of peft."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    adapted: nn.Module = peft.get_peft_model(model, lora).train()
    return adapted


def train_decoder(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    seen = []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        tokens = torch.randint(64, (2, 12))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model.eval()(input_ids=tokens).logits)
        model.train()
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def test_adapters_of_peft() -> None:
    plain = train_decoder(adapted_decoder())
    with applied(ahead=10_000) as (lever, said):
        model = adapted_decoder()
        assert same(train_decoder(model), plain)
        assert on_host(lever) == 3 * 7 + 2 and not said
        merged = model.merge_and_unload()  # type: ignore[operator]
        assert same([*merged.state_dict().values()], [*merged_plainly().state_dict().values()])


def merged_plainly() -> Any:
    model: Any = adapted_decoder()
    train_decoder(model)
    return model.merge_and_unload()


class Writes(nn.Module):
    """Its frozen layer, which `write` does something to, in the middle of its forward."""

    def __init__(self, write: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.before, self.after = Adapted(), Adapted()
        self.layer = frozen(nn.Linear(WIDTH, WIDTH))
        self.layer.register_forward_pre_hook(lambda layer, _: write(layer))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)))


def add_unseen(layer: nn.Linear) -> None:
    layer.weight.data.add_(0.1)


def add_seen(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(0.1)


@pytest.mark.parametrize("write", [add_unseen, add_seen])
def test_a_module_that_writes_to_its_weight_keeps_it(write: Any) -> None:
    torch.manual_seed(1)
    plain = Writes(write)
    found = copy.deepcopy(plain)
    expected = train(plain)
    with applied() as (lever, said):
        assert same(train(found), expected)
        assert on_host(lever) == 2
    assert said == ["a frozen weight stays on the card: its module writes to it"]


@pytest.mark.parametrize("write", [add_unseen, add_seen])
def test_writes_between_the_steps_are_heeded(write: Any) -> None:
    def between(model: nn.Module) -> Callable[[int], object]:
        return lambda _step: [write(one.base) for one in model.children()]

    plain, found = made("adapted"), made("adapted")
    expected = train(plain, between(plain))
    with applied() as (lever, said):
        assert same(train(found, between(found)), expected)
        assert on_host(lever) == 4 and not said


def test_a_write_between_forward_and_backward_is_refused_as_ever() -> None:
    for lever in (False, True):
        with applied(share=float(lever)):
            model: Any = made("adapted")
            loss = model(torch.ones(2, WIDTH)).sum()
            add_seen(model[2].base)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_layers_that_are_unfrozen_converted_or_given_other_data() -> None:
    def between(model: Any) -> Callable[[int], object]:
        def change(step: int) -> None:
            if step == 0:
                model[1].base.requires_grad_(True)
                model[2].base.weight.data = torch.ones(WIDTH, WIDTH) / WIDTH
            else:
                model.double().float()

        return change

    plain, found = made("adapted"), made("adapted")
    expected = train(plain, between(plain))
    with applied() as (lever, said):
        assert same(train(found, between(found)), expected)
        assert on_host(lever) == 3
    assert said == ["a frozen weight stays on the card: it is trained now"]


def test_a_forward_that_raises_leaves_all_in_place() -> None:
    class Raises(nn.Linear):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("not now")
            return super().forward(x)

    torch.manual_seed(1)
    model = nn.Sequential(Adapted(), frozen(Raises(WIDTH, WIDTH)), Adapted())
    expected = copy.deepcopy(model)
    expected[1].fails = False  # type: ignore[assignment]
    found = train(expected)
    with applied() as (lever, _):
        with pytest.raises(ValueError, match="not now"):
            model(torch.ones(2, WIDTH))
        model[1].fails = False  # type: ignore[assignment]
        assert same(train(model), found)
        assert on_host(lever) == 3


def test_a_model_that_is_gone_leaves_nothing_on_the_host() -> None:
    with applied() as (lever, _):
        for _ in range(3):
            model = made("adapted")
            train(model)
            assert on_host(lever) == 4
            del model
        assert not on_host(lever)


def test_a_host_that_gives_no_memory_leaves_weights_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = train(made("adapted"))

    class Refusing:
        taken = 0

        def mmap(self, _file: int, nbytes: int) -> bytearray:
            self.taken += 1
            if self.taken > 2:
                raise OSError("Cannot allocate memory")
            return bytearray(nbytes)

    monkeypatch.setattr(weight, "mmap", Refusing())
    with applied() as (lever, said):
        model = made("adapted")
        assert same(train(model), plain)
        assert on_host(lever) == 2
    assert len(said) == 1 and "Cannot allocate memory" in said[0]


def test_a_host_with_too_little_is_told_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "available_bytes", lambda: 1 << 30)
    said: list[str] = []
    plan = Plan(frozen=FrozenPart(share=1.0, ahead_bytes=0, host_bytes=3 << 30))
    with plan_in_effect(plan, [], lambda _, text: said.append(text)):
        assert said == [
            "frozen weights stay on the card: the plan needs 3.0 GiB of the host's memory, and "
            "1.0 GiB are left"
        ]


@pytest.mark.parametrize("name", ["adapted", "tied", "trunk", "attention"])
@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_beside_recomputation_and_offload(name: str, ahead: int) -> None:
    """Under every kind of tape, a step is the plain one."""

    def step(model: Any) -> Any:
        loss = model(torch.ones(8, WIDTH).cumsum(0) / 8).square().mean()
        loss.backward()
        return loss

    with applied(ahead=ahead) as (_, said):
        check(Job(MODELS[name], step))
    assert not said


def test_a_recomputation_keeps_no_weight_on_the_device() -> None:
    """What the replays read is fetched for them, and let go of."""
    model = made("adapted")
    spy = Spy()
    x = torch.ones(8, WIDTH)
    with applied(ahead=0), recorded(model, spy):
        model(x).sum().backward()
    choice = choices([op for op in spy.ops if op[0] != FETCH])["everything"]
    blocks: list[weakref.ref[torch.UntypedStorage]] = []
    take = Weight.take

    def noted(one: Weight) -> Tensor:
        block = take(one)
        blocks.append(weakref.ref(block.untyped_storage()))
        return block

    with applied(ahead=0) as _, recomputations() as names, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weight, "take", noted)
        with recorded(model, choice.decisions()):
            loss = model(x).sum()
            assert len(blocks) == 4 and not any(block() for block in blocks)
            loss.backward()
    assert names and len(blocks) > 8 and not any(block() for block in blocks)


def test_a_write_to_what_was_copied_ahead_is_heeded() -> None:
    def writing() -> nn.Module:
        model: Any = made("adapted")
        model[1].register_forward_pre_hook(lambda *_: add_seen(model[3].base))
        return cast("nn.Module", model)

    plain = train(writing())
    with applied() as (lever, said):
        model = writing()
        assert same(train(model), plain)
        assert on_host(lever) == 4 and not said


def test_what_runs_again_and_is_read_next_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    fetch = Weight.fetch

    def noted(one: Weight) -> None:
        fetched.append(1)
        fetch(one)

    monkeypatch.setattr(Weight, "fetch", noted)
    counts = []
    with applied():
        model = made("checkpointed")
        for _ in range(3):
            model(torch.ones(8, WIDTH)).sum().backward()
            counts.append(len(fetched))
            fetched.clear()
    # Of six weights: forward, its repetition, backward; the last of each of three layers is kept.
    assert counts[-1] == 3 * 6 - 3

"""Step graphs for tests and benchmarks: arbitrary ones, and ones shaped like training steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from memplan.recompute.selection import Selection
from memplan.types.step_graph import GraphOps, GraphValues, StepGraph


@dataclass
class GraphDraft:
    """Rows and values as lists, and `graph` to make a StepGraph of them."""

    forward_ops: int = 0
    name: list[str] = field(default_factory=list)
    module: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    replayable: list[bool] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    alloc: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    droppable: list[bool] = field(default_factory=list)

    def value(self, nbytes: int, alloc: int = -1) -> int:
        self.bytes.append(nbytes)
        self.alloc.append(alloc)
        self.free.append(-1)
        self.droppable.append(False)
        return len(self.bytes) - 1

    def op(self, name: str, module: str, seconds: float, reads: list[int]) -> int:
        self.name.append(name)
        self.module.append(module)
        self.seconds.append(seconds)
        self.replayable.append(True)
        self.reads.append(list(dict.fromkeys(reads)))
        self.writes.append([])
        return len(self.name) - 1

    def graph(
        self, base_bytes: int = 0, rest_peak_bytes: int = 0, passes: int = 1, others: int = 0
    ) -> StepGraph:
        rows = len(self.name)
        seen: dict[str, int] = {}
        nth = []
        for row, name in enumerate(self.name):
            forward = row < self.forward_ops
            nth.append(seen.get(name, 0) if forward else -1)
            seen[name] = seen.get(name, 0) + 1
        ops = GraphOps(
            name=self.name,
            call=np.array([0 if row < self.forward_ops else -1 for row in range(rows)]),
            nth=np.array(nth, dtype=np.int64),
            module=self.module,
            seconds=np.array(self.seconds, dtype=np.float64),
            flops=np.zeros(rows, dtype=np.int64),
            replayable=np.array(self.replayable, dtype=np.bool_),
            reads_start=_starts(self.reads),
            reads=_flat(self.reads),
            writes_start=_starts(self.writes),
            writes=_flat(self.writes),
        )
        values = GraphValues(
            bytes=np.array(self.bytes, dtype=np.int64),
            alloc=np.array(self.alloc, dtype=np.int64),
            free=np.array(self.free, dtype=np.int64),
            droppable=np.array(self.droppable, dtype=np.bool_),
            name=[""] * len(self.bytes),
        )
        graph = StepGraph(
            ops, values, self.forward_ops, base_bytes, rest_peak_bytes, passes, others
        )
        graph.check()
        return graph


def _starts(lists: list[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


def _flat(lists: list[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([item for items in lists for item in items], dtype=np.int64)


def arbitrary_graph(rng: random.Random, forward: int, backward: int, others: int = 0) -> StepGraph:
    """Anything a StepGraph can say: in-place ops, ops that cannot be replayed, several outputs,
    values that live on, values nobody reads, values from before the pass."""
    draft = GraphDraft(forward_ops=forward)
    for _ in range(rng.randint(0, 2)):
        draft.value(rng.choice([0, 3]))
    for row in range(forward + backward):
        known = range(len(draft.bytes))
        reads = rng.sample(known, min(len(known), rng.randint(0, 3)))
        draft.op(f"op{rng.randint(0, 3)}", rng.choice(["", "a", "a.b"]), rng.randint(0, 4), reads)
        draft.replayable[row] = rng.random() < 0.93
        made = [draft.value(rng.randint(0, 9), row) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
        changed = rng.sample(reads, 1) if reads and rng.random() < 0.15 else []
        draft.writes[row] = [v for v in made if rng.random() < 0.95] + changed
    for value, alloc in enumerate(draft.alloc):
        touched = [
            row
            for row in range(forward + backward)
            if value in draft.reads[row] or value in draft.writes[row] or row == alloc
        ]
        last = max(touched, default=0) + 1
        draft.free[value] = min(last + rng.choice([0, 0, 0, 2]), forward + backward)
        if rng.random() < 0.1:
            draft.free[value] = forward + backward
        makers = [row for row in touched if row < forward and value in draft.writes[row]]
        draft.droppable[value] = (
            0 <= alloc < forward
            and draft.free[value] > forward
            and all(draft.replayable[row] for row in {alloc, *makers})
            and rng.random() < 0.9
        )
    return draft.graph(
        rng.randint(0, 5) + others * sum(draft.bytes),
        rng.choice([0, 0, 15]),
        rng.choice([1, 1, 2]),
        others,
    )


def arbitrary_selection(rng: random.Random, graph: StepGraph) -> Selection:
    groups: list[set[int]] = [set() for _ in range(rng.randint(1, 4))]
    keep = rng.random()
    held: set[int] = set()
    for value in range(len(graph.values)):
        if graph.values.droppable[value] and rng.random() > keep:
            rng.choice(groups).add(value)
        elif 0 <= graph.values.alloc[value] < graph.forward_ops and rng.random() < 0.1:
            held.add(value)
    return Selection(tuple(frozenset(group) for group in groups), frozenset(held))


class TrainingStep:
    """Writes a forward and derives its backward: each op's backward reads what the op saved and
    the gradients of its outputs, and makes the gradients of its inputs."""

    def __init__(self) -> None:
        self.draft = GraphDraft()
        self._saved: list[tuple[str, str, float, list[int], list[int], list[int]]] = []
        self._leaves: set[int] = set()

    def input(self, nbytes: int = 0) -> int:
        value = self.draft.value(nbytes)
        self._leaves.add(value)
        return value

    def op(
        self,
        name: str,
        module: str,
        reads: list[int],
        sizes: list[int],
        seconds: float,
        saves: tuple[list[int], list[int]] = ([], []),
        backward: float = 2.0,
    ) -> list[int]:
        """`saves`: which reads and which outputs, by position, backward reads. `backward`: how
        many times longer it takes."""
        row = self.draft.op(name, module, seconds, reads)
        outputs = [self.draft.value(size, row) for size in sizes]
        self.draft.writes[row] = outputs
        saved = [reads[i] for i in saves[0]] + [outputs[i] for i in saves[1]]
        self._saved.append((name, module, seconds * backward, reads, outputs, saved))
        return outputs

    def graph(self, base_bytes: int = 0, rest_peak_bytes: int = 0) -> StepGraph:
        draft = self.draft
        draft.forward_ops = len(draft.name)
        forward_values = len(draft.bytes)
        gradient: dict[int, int] = {}
        for name, module, seconds, reads, outputs, saved in reversed(self._saved):
            incoming = [gradient.pop(v) for v in outputs if v in gradient]
            row = draft.op(f"{name}_backward", module, seconds, [*incoming, *saved])
            for value in dict.fromkeys(reads):
                if value in self._leaves:
                    continue
                made = draft.value(draft.bytes[value], row)
                draft.writes[row].append(made)
                if value not in gradient:
                    gradient[value] = made
                    continue
                pair = [gradient[value], made]
                add = draft.op("add", module, seconds * 0.05, pair)
                draft.writes[add].append(pair[0])
        self._lifetimes(forward_values)
        return draft.graph(base_bytes, rest_peak_bytes)

    def _lifetimes(self, forward_values: int) -> None:
        draft = self.draft
        for value, alloc in enumerate(draft.alloc):
            draft.free[value] = len(draft.name) if alloc < 0 else alloc + 1
        for row in range(len(draft.name)):
            for value in (*draft.reads[row], *draft.writes[row]):
                draft.free[value] = max(draft.free[value], row + 1)
        for value in range(forward_values):
            saved = draft.alloc[value] >= 0 and draft.free[value] > draft.forward_ops
            read = any(value in draft.reads[r] for r in range(draft.forward_ops, len(draft.name)))
            draft.droppable[value] = saved and read


def chain(rng: random.Random, length: int) -> StepGraph:
    """Layers of any size and duration one after another; each saves its input or its output."""
    step = TrainingStep()
    x = step.input()
    for i in range(length):
        saves = rng.choice([([0], []), ([], [0]), ([0], [0])])
        [x] = step.op("layer", f"l.{i}", [x], [rng.randint(4, 40)], rng.randint(1, 20), saves)
    step.op("loss", "loss", [x], [1], 1, ([0], []))
    return step.graph()


def residual_blocks(rng: random.Random, blocks: int) -> StepGraph:
    """Pre-norm residual blocks: norm, two products with an activation between, add."""
    step = TrainingStep()
    [x] = step.op("embed", "embed", [step.input()], [16], 1)
    for i in range(blocks):
        hidden, slow = rng.randint(16, 64), rng.randint(4, 20)
        where = f"blocks.{i}"
        [n] = step.op("norm", where, [x], [16], 1, ([0], []))
        [h] = step.op("up", where, [n], [hidden], slow, ([0], []))
        [a] = step.op("gelu", where, [h], [hidden], 1, ([0], []))
        [y] = step.op("down", where, [a], [16], slow, ([0], []))
        [x] = step.op("add", where, [x, y], [16], 1)
    step.op("loss", "loss", [x], [1], 1, ([0], []))
    return step.graph()


def unet(rng: random.Random, depth: int) -> StepGraph:
    """Down and up again, each level's output joined to the way up."""
    step = TrainingStep()
    [x] = step.op("stem", "stem", [step.input()], [32], 4)
    skips = []
    for i in range(depth):
        size = max(4, 64 >> i)
        [c] = step.op("conv", f"down.{i}", [x], [size], rng.randint(6, 16), ([0], []))
        [r] = step.op("relu", f"down.{i}", [c], [size], 1, ([], [0]))
        skips.append((r, size))
        [x] = step.op("pool", f"down.{i}", [r], [size // 2], 1, ([0], []))
    for i, (skip, size) in enumerate(reversed(skips)):
        [u] = step.op("up", f"up.{i}", [x], [size], 2)
        [j] = step.op("cat", f"up.{i}", [u, skip], [2 * size], 1)
        [c] = step.op("conv", f"up.{i}", [j], [size], rng.randint(6, 16), ([0], []))
        [x] = step.op("relu", f"up.{i}", [c], [size], 1, ([], [0]))
    step.op("loss", "loss", [x], [1], 1, ([0], []))
    return step.graph()


def llama(layers: int, tokens: int = 4096, width: int = 2048, inner: int = 5632) -> StepGraph:
    """Rows of a Llama step, casts and views included, in bytes of bfloat16 and seconds of a
    device of 100 TFLOP/s and 1 TB/s."""
    step = TrainingStep()
    narrow, wide = 2 * tokens * width, 2 * tokens * inner

    def streamed(*sizes: int) -> float:
        return sum(sizes) / 1e12

    def product(a: int, b: int) -> float:
        return 2.0 * tokens * a * b / 1e14

    [x] = step.op("embedding", "embed", [step.input()], [narrow], streamed(narrow))
    for i in range(layers):
        where = f"layers.{i}"

        def norm(value: int, name: str, where: str = where) -> int:
            at = f"{where}.{name}"
            [f] = step.op("to", at, [value], [2 * narrow], streamed(3 * narrow), backward=1)
            [p] = step.op("pow", at, [f], [2 * narrow], streamed(4 * narrow), ([0], []), 1)
            [m] = step.op("mean", at, [p], [4 * tokens], streamed(2 * narrow), backward=1)
            [r] = step.op("rsqrt", at, [m], [4 * tokens], 1e-6, ([], [0]), 1)
            [n] = step.op("mul", at, [f, r], [2 * narrow], streamed(4 * narrow), ([0, 1], []), 1)
            [c] = step.op("to", at, [n], [narrow], streamed(3 * narrow), backward=1)
            [w] = step.op("mul", at, [c], [narrow], streamed(2 * narrow), ([0], []), 1)
            return w

        n = norm(x, "input_layernorm")
        heads = []
        for name in ("q", "k", "v"):
            at = f"{where}.self_attn.{name}_proj"
            [h] = step.op("mm", at, [n], [narrow], product(width, width), ([0], []))
            if name != "v":
                at = f"{where}.self_attn"
                [c] = step.op("mul", at, [h], [narrow], streamed(2 * narrow), backward=1)
                [g] = step.op("neg", at, [h], [narrow], streamed(2 * narrow), backward=1)
                [s] = step.op("mul", at, [g], [narrow], streamed(2 * narrow), backward=1)
                [h] = step.op("add", at, [c, s], [narrow], streamed(3 * narrow), backward=1)
            heads.append(h)
        [a, lse] = step.op(
            "attention",
            f"{where}.self_attn",
            heads,
            [narrow, 128 * tokens],
            2 * tokens * tokens * width / 1e14,
            ([0, 1, 2], [0, 1]),
            2.5,
        )
        del lse
        at = f"{where}.self_attn.o_proj"
        [o] = step.op("mm", at, [a], [narrow], product(width, width), ([0], []))
        [x] = step.op("add", where, [x, o], [narrow], streamed(3 * narrow), backward=0)
        n = norm(x, "post_attention_layernorm")
        at = f"{where}.mlp"
        [g] = step.op("mm", at, [n], [wide], product(width, inner), ([0], []))
        [s] = step.op("silu", at, [g], [wide], streamed(2 * wide), ([0], []), 1.5)
        [u] = step.op("mm", at, [n], [wide], product(width, inner), ([0], []))
        [m] = step.op("mul", at, [s, u], [wide], streamed(3 * wide), ([0, 1], []), 1.5)
        [d] = step.op("mm", at, [m], [narrow], product(width, inner), ([0], []))
        [x] = step.op("add", where, [x, d], [narrow], streamed(3 * narrow), backward=0)
    [logits] = step.op("mm", "lm_head", [x], [8 * tokens * 8192], product(width, 32768), ([0], []))
    [lp] = step.op("log_softmax", "loss", [logits], [8 * tokens * 8192], 1e-3, ([], [0]), 1)
    step.op("nll_loss", "loss", [lp], [4], 1e-5, ([0], []), 1)
    weights = 2 * (layers * (4 * width * width + 3 * width * inner) + 32768 * width)
    return step.graph(base_bytes=4 * weights, rest_peak_bytes=5 * weights)

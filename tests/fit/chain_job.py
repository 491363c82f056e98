"""A job made by hand, a chain of layers, that stands for a captured program; and a plain solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.recompute.evaluate import Evaluator
from memplan.recompute.selection import Selection
from memplan.types.builder import TraceBuilder
from memplan.types.device import DeviceProfile
from memplan.types.plan import Plan, RecomputeGroup
from memplan.types.solution import Infeasible, Solution, Solved
from memplan.types.step_graph import StepGraph
from memplan.types.trace import EventKind, Phase, Role, Trace, TraceMeta
from memplan.worker.captures import Captured, CaptureProgram
from memplan.worker.failure import CaptureFailedError
from memplan.worker.request import Outcome

MIB = 1 << 20
BATCH = 8
_STEPS = 2


def not_captured(message: str) -> CaptureFailedError:
    outcome = Outcome(kind="not_captured", exit_code=4, message=f"error: {message}", hint="another")
    return CaptureFailedError(outcome, "a warning\n")


def capturing(answer: Callable[[ScriptTarget, Plan | None], Captured]) -> CaptureProgram:
    """A capture whose answer depends on the program and the plan alone. A decorator."""

    def capture(
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        return answer(program, plan)

    return capture


class _Writer:
    """Writes the training loop, with a plan in effect."""

    def __init__(
        self,
        layers: int,
        activation: int,
        weight: int,
        groups: list[set[int]],
        early: bool,
        state: int,
        flops: int,
    ) -> None:
        self.builder = TraceBuilder()
        self.layers, self.activation, self.weight = layers, activation, weight
        self.groups = groups
        self.early = early
        self.state = state
        self.flops = flops
        self.dropped = set().union(*groups)
        self.value: dict[int, int] = {}
        """Layer number to the storage of its output, while alive; -1 is the input."""

    def op(self, name: str, reads: Sequence[int] = ()) -> None:
        self.builder.begin_op(f"aten.{name}.default", reads=reads)
        self.builder.op_work(flops=self.flops, moved_bytes=self.activation)

    def alloc(self, nbytes: int, role: Role = Role.UNKNOWN, name: str = "") -> int:
        storage = self.builder.new_storage(role=role, name=name, dtype="float32")
        self.builder.append(EventKind.ALLOC, storage, nbytes)
        return storage

    def free(self, storage: int, nbytes: int) -> None:
        self.builder.append(EventKind.FREE, storage, nbytes)

    def write(self, ballast: int, *, clips: bool, passes: int = 1) -> Trace:
        builder = self.builder
        self.op("empty")
        weights = [self.alloc(self.weight, Role.PARAMETER, f"w{i}") for i in range(self.layers)]
        if ballast:
            self.alloc(ballast, Role.PARAMETER, "ballast")
        states: list[int] = []
        for step in range(_STEPS):
            gradients: list[int] = []
            for number in range(passes):
                made = self._pass(weights, call=step * passes + number)
                for gradient in made if gradients else ():
                    self.free(gradient, self.weight)
                gradients = gradients or made
            if clips:
                builder.phase = Phase.OTHER
                self.op("linalg_vector_norm", gradients)
            builder.phase = Phase.OPTIMIZER
            self.op("_foreach_add_", [*weights, *gradients])
            if not states and self.state:
                states = [self.alloc(self.state, Role.OPTIMIZER_STATE) for _ in weights]
            for gradient in gradients:
                if not self.early:
                    self.free(gradient, self.weight)
            builder.step += 1
            builder.phase = Phase.FORWARD
            builder.append(EventKind.MARK)
        return builder.build(
            TraceMeta(torch_version="2.13.0", gpu="a100-80gb", optimizer_steps=_STEPS)
        )

    def _pass(self, weights: list[int], call: int) -> list[int]:
        builder = self.builder
        builder.phase, builder.call = Phase.FORWARD, -1
        self.op("randn")
        self.value = {-1: self.alloc(self.activation, Role.INPUT)}
        builder.op_writes(self.value.values())
        builder.call = call
        for layer in range(self.layers):
            builder.module = builder.intern(f"blocks.{layer}")
            self._forward(layer, weights)
            if layer - 1 in self.dropped:
                self._let_go(layer - 1)
        builder.phase, builder.call, builder.module = Phase.BACKWARD, -1, 0
        gradients = []
        self.op("ones_like", [self.value[self.layers - 1]])
        above = self.alloc(self.activation)
        builder.op_writes([above])
        for layer in reversed(range(self.layers)):
            if layer - 1 not in self.value:
                self._replay(layer - 1, weights)
            self.op("mm", [above, self.value[layer - 1], weights[layer]])
            gradients.append(self.alloc(self.weight, Role.GRADIENT, f"w{layer}"))
            below = self.alloc(self.activation)
            builder.op_writes([gradients[-1], below])
            if self.early:
                self.op("_foreach_add_", [weights[layer], gradients[-1]])
                self.free(gradients[-1], self.weight)
            self.free(above, self.activation)
            self._let_go(layer - 1)
            if layer == self.layers - 1:
                self._let_go(layer)
            above = below
        self.free(above, self.activation)
        return gradients

    def _forward(self, layer: int, weights: list[int]) -> None:
        self.op("mm", [self.value[layer - 1], weights[layer]])
        self.value[layer] = self.alloc(self.activation)
        self.builder.op_writes([self.value[layer]])

    def _let_go(self, layer: int) -> None:
        self.free(self.value.pop(layer), self.activation)

    def _replay(self, layer: int, weights: list[int]) -> None:
        """The whole group of a layer's output, in forward order from what is alive."""
        group = next(group for group in self.groups if layer in group)
        first = max(number for number in self.value if number < min(group))
        for number in range(first + 1, layer + 1):
            if number not in self.value:
                self._forward(number, weights)
            if number - 1 > first and number - 1 not in group:
                self._let_go(number - 1)


@dataclass
class ChainProgram:
    """Captures `train.py --batch-size N --accumulate N`: 24 layers of 64 MiB at batch 8, and their
    weights."""

    profile: DeviceProfile
    layers: int = 24
    weight: int = 8 * MIB
    clips: bool = True
    """Gradients, before the optimizer's step: no update may come earlier."""
    ballast: Callable[[int], int] = lambda attempt: 0
    """More bytes than planned in the n-th capture with a plan, from 1; negative ones less."""
    refuses: Callable[[int], bool] = lambda batch: False
    moves_state: bool = False
    """Whether the optimizer's state can be on the host."""
    flops: int = 0
    """Of each operator."""
    asked: list[tuple[ScriptTarget, Plan | None]] = field(default_factory=list)

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        on_host = plan.state.share if plan is not None and plan.state is not None else 0.0
        if on_host and not self.moves_state:
            raise not_captured("this optimizer's state stays where it is")
        self.asked.append((program, plan))
        changed = program if plan is None else program.with_arguments(plan)
        batch, passes = _option(changed, "--batch-size", BATCH), _option(changed, "--accumulate", 1)
        if self.refuses(batch):
            raise not_captured(f"no batch of {batch}\nwith a second line")
        groups = [{place.nth for place in group.drop} for group in _groups(plan)]
        planned = sum(plan is not None for _, plan in self.asked)
        extra = self.ballast(planned) if groups else 0
        weight = self.weight + min(extra, 0) // self.layers
        early = plan is not None and plan.order is not None and not self.clips
        state = int(2 * weight * (1 - on_host))
        if plan is not None and plan.low_bit is not None:
            state //= 4
        writer = _Writer(
            self.layers, 8 * MIB * batch, weight, groups, early, state=state, flops=self.flops
        )
        trace = writer.write(max(extra, 0), clips=self.clips, passes=passes)
        return Captured(trace, estimate(trace, self.profile))


def _option(program: ScriptTarget, name: str, default: int) -> int:
    argv = program.argv
    return int(argv[argv.index(name) + 1]) if name in argv else default


def _groups(plan: Plan | None) -> Iterator[RecomputeGroup]:
    yield from plan.recompute.groups if plan is not None and plan.recompute is not None else []


class Greedy:
    """Drops values of a chain in equal segments, one group each: few segments are slow to
    recompute, many keep more. What `memplan.recompute.solve` offers, without its quality."""

    def __init__(self) -> None:
        self.budgets: list[int] = []
        self._known: dict[tuple[int, bytes, bytes], list[tuple[int, float, Selection]]] = {}

    def solve(
        self, graph: StepGraph, budget_bytes: int, *, deadline_seconds: float
    ) -> Solution[Selection]:
        self.budgets.append(budget_bytes)
        found = [
            (added, selection)
            for peak, added, selection in self._all(graph)
            if peak <= budget_bytes
        ]
        if not found:
            return Infeasible("none of the selections", min(peak for peak, *_ in self._all(graph)))
        added, selection = min(found, key=lambda item: item[0])
        return Solved(selection, added, 0.0)

    def least_peak(self, graph: StepGraph, *, deadline_seconds: float) -> Solution[Selection]:
        self.budgets.append(0)
        peak, _, selection = min(self._all(graph), key=lambda item: item[:2])
        return Solved(selection, peak, 0.0)

    def _all(self, graph: StepGraph) -> list[tuple[int, float, Selection]]:
        key = (graph.base_bytes, graph.values.droppable.tobytes(), graph.values.bytes.tobytes())
        if key in self._known:
            return self._known[key]
        known = self._known[key] = []
        evaluator = Evaluator(graph)
        droppable = [v for v in range(len(graph.values)) if graph.values.droppable[v]]
        for count in range(0, len(droppable) + 1, 2):
            for length in (2, 3, 5):
                dropped = [v for i, v in enumerate(droppable[:count]) if i % length]
                groups = [
                    frozenset(v for v in dropped if droppable.index(v) // length == number)
                    for number in range(count // length + 1)
                ]
                selection = Selection(tuple(filter(None, groups)))
                found = evaluator.evaluate(selection)
                known.append((found.peak_bytes, found.added_seconds, selection))
        return known

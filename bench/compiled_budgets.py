"""Budgets of compiled graphs beside PyTorch's `activation_memory_budget`.

    python -m bench.compiled_budgets [NAME…]

GPT-2 small, ResNet-50, a U-Net, ViT-B/16 and a Llama of eight layers, from their configurations,
without dropout (PyTorch's gradients are not reliable with it below a budget of 1). The joint graph
of forward, loss and backward is traced once. PyTorch's min-cut partitioner divides it for fractions
of its own, with the knapsack solvers "dp" and "ilp"; ours for a budget of the peak that each of
these was measured to have, and for a row of budgets between the least peak and the plain one.

All are run by the same executor, operators in place where they may be, each storage freed at its
last use: PyTorch's graphs in their own order, ours in the order that is found. The peak is that of
the CPU allocator's record, FLOPs are counted by `FlopCounterMode` while the graphs run. Each model
is a process of its own. Writes `bench/results/compiled_budgets.json`
after each model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu_jobs.models import UNet
from bench.process import measured_apart
from bench.recompute.inductor import solvers
from bench.recompute.tracker import measure
from bench.results import write_result
from memplan.capturing.standins.adapters import make_torchvision_importable
from memplan.runtime.graph.backend import _Parts
from memplan.runtime.graph.compile import Options
from memplan.runtime.graph.in_place import in_place
from memplan.runtime.graph.joint import Joint, copied
from memplan.runtime.graph.operator_graph import operator_graph
from memplan.runtime.graph.ordering import Ordering, choose_order
from memplan.runtime.graph.program import program_of
from memplan.runtime.graph.region import Region, region

SEED = 1729
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
BUDGETS = 6
"""Of ours, beside the peaks of PyTorch's."""


class _Text(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class _Pictures(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pictures), labels)


Case = tuple[nn.Module, tuple[Tensor, ...]]


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _Text(GPT2LMHeadModel(config)), (torch.randint(50257, (1, 256)),)


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=4,
    )  # fmt: skip
    return _Text(LlamaForCausalLM(config)), (torch.randint(8000, (1, 256)),)


def _torchvision(name: str, batch: int) -> Case:
    import torchvision

    pictures, labels = torch.rand(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return _Pictures(torchvision.models.get_model(name, weights=None)), (pictures, labels)


def _unet() -> Case:
    return _Pictures(UNet()), (torch.rand(1, 3, 128, 128), torch.randint(2, (1, 128, 128)))


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": _gpt2,
    "resnet50": lambda: _torchvision("resnet50", 2),
    "unet": _unet,
    "vit_b_16": lambda: _torchvision("vit_b_16", 2),
    "llama_8_layers": _llama,
}


@dataclass(frozen=True)
class _Divided(Joint):
    """A joint graph as somebody else divides it."""

    theirs: tuple[fx.GraphModule, fx.GraphModule] | None = None

    @property
    def parts(self) -> Any:
        return self.theirs


class Traced:
    """A model's joint graph, and what its forward is called with."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.joint: Joint | None = None
        self.arguments: list[Any] = []

        def partition(module: Any, given: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
            self.joint = Joint(copied(module), given, num_fwd_outputs, more)
            return self.joint.parts

        def forward(module: Any, _inputs: Any) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                self.arguments = list(arguments)
                return module(*arguments)

            return run

        def backend(module: Any, given: Any) -> Any:
            compile_parts: Any = aot_module_simplified
            return compile_parts(
                module, given, fw_compiler=forward, bw_compiler=lambda m, _: m,
                partition_fn=partition,
            )  # fmt: skip

        with functorch_config.patch(donated_buffer=False):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs)

    def of_pytorch(self, fraction: float, solver: str) -> tuple[Region, Ordering]:
        """PyTorch's division, in its own order."""
        joint = self.joint
        assert joint is not None
        with functorch_config.patch(
            activation_memory_budget=fraction,
            activation_memory_budget_solver=solver,
            graphsafe_rng_functionalization=False,
        ):
            parts = min_cut_rematerialization_partition(
                copied(joint.module), joint.inputs, num_fwd_outputs=joint.results, **joint.options
            )
        divided = _Divided(joint.module, joint.inputs, joint.results, joint.options, parts)
        one = region(divided)
        graph = operator_graph(in_place(program_of(one.module)))
        return one, choose_order(graph, search=False, deadline_seconds=0.0, seed=0)

    def ours(self, budget: int | str | None) -> tuple[Region, Ordering]:
        assert self.joint is not None
        made = _Parts(Options(budget))._choose(self.joint)
        return made.region, made.ordering

    def measured(self, made: tuple[Region, Ordering]) -> dict[str, int]:
        """Peak and FLOPs of a real run, and the peak that was promised."""
        one, ordering = made
        forward, backward = one.executables(ordering.nodes)

        def step() -> object:
            returned = list(forward(list(self.arguments)))
            kept = returned[: one.results]
            received = returned[one.results :] + [torch.ones_like(r) for r in tangents(kept)]
            returned.clear()
            return backward(received), kept

        def tangents(kept: list[Any]) -> list[Tensor]:
            return [kept[-1]] * len(one.tangents)  # the loss, behind what forward changed

        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            step()
        resident = [one for one in self.arguments if isinstance(one, Tensor)]
        with torch.no_grad():
            peak = measure(step, resident).peak_bytes
        return {
            "peak_bytes": peak,
            "flops": int(counter.get_total_flops()),
            "promised_bytes": ordering.report.ordered_peak_bytes,
        }


def one(name: str) -> dict[str, Any]:
    """All of one model, in this process."""
    make_torchvision_importable()
    torch.manual_seed(SEED)
    model, inputs = MODELS[name]()
    model.train()
    traced = Traced(model, inputs)
    began = time.perf_counter()
    made = traced.ours(None)
    without = time.perf_counter() - began
    plain = traced.measured(made)

    def of_ours(budget: int | str) -> dict[str, Any]:
        began = time.perf_counter()
        made = traced.ours(budget)
        seconds = time.perf_counter() - began
        found = {"budget": budget, "seconds": seconds, **traced.measured(made)}
        print(f"  {name} {budget}: {found}", flush=True)
        return found

    least = of_ours("least")
    theirs, beside = [], {}
    for solver in solvers():
        for fraction in FRACTIONS:
            began = time.perf_counter()
            made = traced.of_pytorch(fraction, solver)
            seconds = time.perf_counter() - began
            point = {"solver": solver, "fraction": fraction, "seconds": seconds}
            theirs.append(point | traced.measured(made))
            print(f"  {name} {theirs[-1]}", flush=True)
            budget = given(theirs[-1])
            if budget not in beside:
                beside[budget] = of_ours(budget)
    low, high = given(least), given(plain)
    row = [of_ours(low + (high - low) * part // BUDGETS) for part in range(BUDGETS)]
    return {
        "plain": plain,
        "without_budget_seconds": without,
        "least": least,
        "pytorch": theirs,
        "ours": [*beside.values(), *row],
    }


def given(point: dict[str, Any]) -> int:
    """The budget that a measured peak is: with the loss's gradient, which is not seen to begin."""
    return max(int(point["peak_bytes"]), int(point["promised_bytes"]))


def run(name: str) -> dict[str, Any]:
    found: dict[str, Any] = measured_apart("bench.compiled_budgets", name)
    return found


def inversions(points: list[dict[str, Any]]) -> int:
    """Pairs of neighbouring budgets of which the smaller has the higher peak, or the larger more
    FLOPs."""
    row = sorted(points, key=lambda point: int(point["budget"]))
    return sum(
        a["peak_bytes"] > b["peak_bytes"] or a["flops"] < b["flops"] for a, b in pairwise(row)
    )


def summarize(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the goals ask."""
    pairs = []
    for model in models.values():
        ours = {point["budget"]: point for point in model["ours"]}
        pairs += [(point, ours[given(point)]) for point in model["pytorch"]]
    every = [point for model in models.values() for point in model["ours"]]
    return {
        "models": len(models),
        "points": len(pairs),
        "not_more_flops": sum(mine["flops"] <= theirs["flops"] for theirs, mine in pairs),
        "not_more_bytes": sum(mine["peak_bytes"] <= theirs["peak_bytes"] for theirs, mine in pairs),
        "budgets": len(every),
        "kept": sum(point["peak_bytes"] <= point["budget"] for point in every),
        "inversions": sum(inversions(model["ours"]) for model in models.values()),
        "most_seconds": max(point["seconds"] for point in every),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--out", type=Path, help="measure one model in this process")
    options = parser.parse_args(arguments)
    if options.out is not None:
        warnings.simplefilter("ignore")
        options.out.write_text(json.dumps(one(options.names[0])), encoding="utf-8")
        return 0
    models: dict[str, dict[str, Any]] = {}
    for name in options.names:
        models[name] = run(name)
        summary = summarize(models)
        write_result("compiled_budgets", {"summary": summary, "models": models})
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Keeping, recomputing or offloading each value, by the model of `memplan.recompute.transfers`
(`offload.json`). All of it is simulated: seconds are the time model's, copies the data sheet's.

Small graphs: the choice beside the best of all plans. The blocks of a Llama-3-8B: the choice beside
the bound, recomputation alone and offload alone. The whole model, one rank of eight on H100: what
9.9 % and 20.4 % less memory cost, beside what pytorch/torchtitan#3521 reports for its own offload
(under 1 % time, under 7 %), measured there, with a baseline that may differ from ours. The steps
are made ones, in a Llama's sizes, with as many key heads as heads.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np

from bench.results import write_result
from memplan.recompute.evaluate import evaluate
from memplan.recompute.offload import Link
from memplan.recompute.selection import Selection
from memplan.recompute.solve import Solver
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.solution import Solved
from memplan.types.step_graph import StepGraph
from tests.oracles.exhaustive_offload import best_plans, least_seconds
from tests.recompute.graphs import chain, llama, residual_blocks, unet
from tests.recompute.offloads import evaluate_offload, in_order, solve

SMALL_GRAPHS = 12
MOST_SAVED = 7
"""Values of a small graph that may be kept, dropped or offloaded; exhaustive search allows no more
than a few."""
SHARES = (0.0, 0.25, 0.5, 0.8)
SECONDS = 20.0
TOKENS, WIDTH, INNER, LAYERS = 8192, 4096, 14336, 32
PER_RANK = 8_030_000_000 * 16 // 8
"""Parameters, gradients and AdamW's state in fp32, sharded over eight."""
BLOCKS = 4
PUBLISHED = {"less_099": (0.099, 0.01), "less_204": (0.204, 0.07)}
"""Less memory, at under so much time."""


def small_results() -> dict[str, Any]:
    """How often the choice is the best of all plans, and how far it is from it at worst."""
    equal, count, worst, values = 0, 0, 0.0, []
    for seed in range(SMALL_GRAPHS):
        rng = random.Random(seed)
        made = (
            chain(rng, rng.randint(5, 8)),
            residual_blocks(rng, rng.choice((1, 2))),
            unet(rng, rng.choice((1, 2))),
        )
        fitting = [graph for graph in made if graph.values.droppable.sum() <= MOST_SAVED]
        if not fitting:
            continue
        graph, rate = rng.choice(fitting), rng.choice((0.5, 1.0, 2.0, 4.0, 8.0))
        values.append(len(graph.values))
        plans = best_plans(graph, rate)
        plain = evaluate(graph, Selection()).peak_bytes
        for share in SHARES:
            budget = int(plans[0][0] + share * (plain - plans[0][0]))
            found = solve(graph, budget, Link(rate), deadline_seconds=SECONDS)
            best = least_seconds(plans, budget)
            cost = found.cost if isinstance(found, Solved) else float("inf")
            excess = (cost - best) / graph.plain_seconds
            count += 1
            equal += excess < 1e-9
            worst = max(worst, excess)
        print(f"small {seed}: {equal} of {count}", flush=True)
    return {
        "problems": count,
        "equal": equal,
        "share_equal": equal / count,
        "worst_excess_of_step": worst,
        "values": [min(values), max(values)],
    }


def point(graph: StepGraph, budget: int, link: Link) -> dict[str, Any]:
    """One budget: the choice, its bound and the simple ways, as fractions of the plain step."""
    began = time.perf_counter()
    found = solve(graph, budget, link, deadline_seconds=SECONDS)
    seconds = time.perf_counter() - began
    assert isinstance(found, Solved), "a budget that is too small"
    dropping = Solver().solve(graph, budget, deadline_seconds=SECONDS)
    moving = in_order(graph, budget, link)
    judged = evaluate_offload(graph, found.solution, link.bytes_per_second)
    plain = graph.plain_seconds
    return {
        "budget_bytes": budget,
        "peak_bytes": judged.peak_bytes,
        "host_bytes": judged.host_bytes,
        "added_fraction": found.cost / plain,
        "bound_fraction": found.bound / plain,
        "excess": (plain + found.cost) / (plain + found.bound) - 1,
        "recompute_only": dropping.cost / plain if isinstance(dropping, Solved) else None,
        "offload_in_order": None if moving is None else moving.added_seconds / plain,
        "seconds": seconds,
    }


def made_llama(layers: int, card: DeviceProfile) -> StepGraph:
    """With seconds of a card; those of the made step are of 100 TFLOP/s and 1 TB/s."""
    graph = llama(layers, TOKENS, WIDTH, INNER)
    products = [name.startswith(("mm", "attention")) for name in graph.ops.name]
    faster = np.where(
        products,
        card.peak_flops["bf16"] / 1e14,
        card.memory_bandwidth_bytes_per_second / 1e12,
    )
    ops = replace(graph.ops, seconds=graph.ops.seconds / faster)
    return replace(graph, ops=ops, rest_peak_bytes=0)


def main() -> None:
    profile = find_profile("h100")
    link = Link(profile.host_link_bytes_per_second)
    blocks = made_llama(BLOCKS, profile)
    plain = evaluate(blocks, Selection()).peak_bytes
    saved = plain - blocks.base_bytes
    whole = replace(made_llama(LAYERS, profile), base_bytes=PER_RANK)
    peak = evaluate(whole, Selection()).peak_bytes
    data: dict[str, Any] = {"link_bytes_per_second": link.bytes_per_second}
    data["blocks"] = {
        f"keep_{int(share * 100)}": point(blocks, blocks.base_bytes + int(share * saved), link)
        for share in (0.9, 0.8, 0.7, 0.6)
    }
    data["blocks_worst_excess"] = max(one["excess"] for one in data["blocks"].values())
    print(data, flush=True)
    data["llama3_8b"] = {"plain_peak_bytes": peak, "plain_seconds": whole.plain_seconds}
    for name, (less, _) in PUBLISHED.items():
        data["llama3_8b"][name] = point(whole, int((1 - less) * peak), link)
    print(data, flush=True)
    data["small"] = small_results()
    print(write_result("offload", data))


if __name__ == "__main__":
    main()

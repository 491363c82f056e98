"""Applies a plan's part about compiled regions to everything that PyTorch Inductor compiles.

Inductor can be given a partitioner of joint graphs (`config.custom_partitioner_fn`). Here it splits
graphs that the plan names as the plan says, and others as PyTorch does.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memplan.capturing.compiled.origins import origin_of
from memplan.types.plan import CompiledRegion, RegionsPart

if TYPE_CHECKING:
    from memplan.runtime.graph.joint import Joint


_DUMPS = "_get_unique_path"
"""PyTorch's function that names the file which it writes where it finds no partition."""


class PlannedRegions(CustomPartitionerFn):
    """A context manager with the plan in effect. `on_note` gets a sentence for each part of the
    plan that cannot be followed, `on_region` what is recomputed in each graph."""

    def __init__(
        self,
        part: RegionsPart,
        on_note: Callable[[str], None],
        on_region: Callable[[CompiledRegion], None] | None = None,
    ) -> None:
        self._part = part
        self._known = {region.graph: region for region in part.regions}
        self._on_note = on_note
        self._on_region = on_region
        self._met: set[str] = set()
        self._before: Any = None
        self._hits = 0

    def __enter__(self) -> PlannedRegions:
        self._before = config.custom_partitioner_fn
        config.custom_partitioner_fn = self
        self._hits = _cache_hits()
        return self

    def __exit__(self, *_exc: object) -> None:
        if config.custom_partitioner_fn is self:
            config.custom_partitioner_fn = self._before
        missed = len(self._known.keys() - self._met)
        # A graph that PyTorch finds in its cache on disk, split under this `uuid`, is not compiled.
        if missed and _cache_hits() == self._hits:
            self._on_note(
                f"{missed} of the {len(self._known)} compiled graphs of the plan were not compiled "
                "in this run"
            )

    def uuid(self) -> bytes:
        """A key for PyTorch's caches, so that graphs with this plan are kept apart from others."""
        return hashlib.blake2b(msgspec.json.encode(self._part)).digest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        # Importing Inductor takes seconds; here it is imported already.
        from torch._functorch import partitioners

        from memplan.runtime.graph.fused import split, tag
        from memplan.runtime.graph.joint import Joint, copied, is_random

        results = kwargs.pop("num_fwd_outputs")
        kwargs.pop("compiler", None)  # other partitioners do not know it
        joint = Joint(gm, joint_inputs, results, kwargs)
        digest = _digest(gm)
        region = self._known.get(digest) or self._chosen(joint, digest)
        if region is None:
            return split(joint, gm)
        self._met.add(digest)
        drawn = {node.name for node in gm.graph.nodes if is_random(node)}
        tagged = copied(gm)
        tag(tagged.graph, frozenset(region.recomputed) - drawn)
        try:
            with mock.patch.object(partitioners, _DUMPS, lambda *_: os.devnull, create=True):
                parts = split(joint, tagged)
        except Exception:  # a changed plan file may ask for a partition that does not exist
            self._on_note(f"the compiled graph of {region.name} cannot run with this plan")
            return split(joint, gm)
        if self._on_region is not None:
            self._on_region(region)
        return parts

    def _chosen(self, joint: Joint, digest: str) -> CompiledRegion | None:
        """What to recompute in a graph that the plan does not name. None where the plan has no rule
        for it, or where the graph has unknown operators."""
        name = _name(joint.module)
        if not self._part.share:
            self._on_note(
                f"the compiled graph of {name} is not one of the plan's, and runs as without it: "
                "was the plan made for other arguments, or another version of PyTorch?"
            )
            return None
        from memplan.runtime.graph.workspaces import is_symbolic

        inputs = joint.module.graph.find_nodes(op="placeholder")
        if any(is_symbolic(node.meta.get("val")) for node in inputs):
            self._on_note(
                f"nothing is recomputed in the compiled graph of {name}: its shapes may change"
            )
            return None
        from memplan.recompute.frontier import choices
        from memplan.runtime.graph.fused import recomputed_names
        from memplan.runtime.graph.recompute_problem import problem_without_saves

        try:
            whole = problem_without_saves(joint)
        except ValueError as error:
            self._on_note(f"nothing is recomputed in the compiled graph of {name}: {error}")
            return None
        beside, held = self._part.beside, int(whole.graph.values.bytes.sum())
        base = whole.graph.base_bytes + beside * held
        row = choices(replace(whole.graph, others=beside, base_bytes=base))
        number = round(self._part.share * (len(row) - 1))
        again = whole.replays(row[number].selection) if number else ()
        found = CompiledRegion(digest, name, sorted(recomputed_names(joint, again)))
        self._known[digest] = found
        return found


def _cache_hits() -> int:
    """How many graphs this process found in PyTorch's cache."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def _digest(module: fx.GraphModule) -> str:
    words = "\n".join(f"{node.op} {node.name} {node.target}" for node in module.graph.nodes)
    return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()


def _name(module: fx.GraphModule) -> str:
    lines = (origin_of(node).source for node in module.graph.nodes if node.op == "call_function")
    return next(filter(None, lines), "the job")

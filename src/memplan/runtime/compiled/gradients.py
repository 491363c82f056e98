"""Gradients that the next step frees before it needs them, freed in this one."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from memplan.runtime.compiled.program import StepProgram


def without_old_gradients(program: StepProgram) -> StepProgram:
    """The program with `.grad` left None where it begins by freeing it, so that a gradient lives no
    longer than the update needs it."""
    freed = {(id(place.owner), place.key) for place in program.frees}
    dropped = [
        one
        for one in program.gradients
        if one.output is not None and (id(one.place.owner), one.place.key) in freed
    ]
    still = {leaf.output for leaf in program.result_leaves}
    still |= {rebound.output for rebound in program.rebound}
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(program.graph_module.graph, copied)
    assert isinstance(outputs, (tuple, list))
    gone = {gradient.output for gradient in dropped} - still
    graph.output(tuple(None if place in gone else one for place, one in enumerate(outputs)))
    storages = [replace(s, maker=copied.get(s.maker, s.maker)) for s in program.storages]
    return replace(
        program,
        graph_module=fx.GraphModule(program.graph_module, graph),
        storages=storages,
        gradients=[
            replace(one, output=None) if one in dropped else one for one in program.gradients
        ],
    )

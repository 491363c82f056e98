"""Pipeline stages of `torch.distributed.pipelining`: what their neighbours would tell them.

Before its first step a stage built by hand learns its inputs' shapes from the stage before it and
its output gradients' from the one after. A gradient has the geometry of its tensor, so the second
is known here. The first is what the script gave as `input_args`, else what the rank before it
really would send, which `peers` finds out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from memplan.capturing.distributed.communicators import Communicators
from memplan.capturing.distributed.peers import Peers
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError

_MODULE = "torch.distributed.pipelining.stage"


class Pipelines:
    """Stand-ins for the exchanges between stages."""

    def __init__(self, state: CaptureState, communicators: Communicators, peers: Peers) -> None:
        self.state = state
        self.communicators = communicators
        self.peers = peers

    def install(self, patches: Patches, watcher: ImportWatcher) -> None:
        """Install it until `patches.undo()`."""

        def adapt(module: ModuleType) -> None:
            stage = module.PipelineStage
            if (forward := getattr(stage, "_warmup_forward_vote", None)) is not None:
                patches.set(stage, "_warmup_forward_vote", self._vote(module, forward))
                result = self._result(stage._warmup_backward_result)
                patches.set(stage, "_warmup_backward_result", result)
            patches.set(stage, "_recv_meta", self._receiver(module))
            patches.set(stage, "_send_meta", self._sender())
            patches.set(module._PipelineStage, "_move_submod_to_device", _move)

        watcher.add(_MODULE, adapt)

    # Whether shapes are exchanged at all: every rank is taken to vote as this one. Before PyTorch
    # 2.15 the votes travel from stage to stage; since then a collective takes the least of them

    def _vote(self, module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
        def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
            result = original(stage, has_backward, received_acc)
            needed = module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            stage._memplan_vote = 0 if needed else 1
            self._write(result, stage._memplan_vote)
            return result

        return vote

    def _result(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def result(stage: Any, received_result: Any = None) -> Any:
            found = original(stage, received_result)
            self._write(found, stage._memplan_vote)
            return found

        return result

    def _write(self, tensor: torch.Tensor, vote: int) -> None:
        value = torch.tensor([vote], dtype=torch.int32, device="cpu")
        if tensor.device.type == self.state.device_type:
            self.state.values.write(tensor, value)
        else:
            tensor.copy_(value)

    # The exchange

    def _receiver(self, module: ModuleType) -> Callable[[Any, int], Any]:
        def receive(stage: Any, src_stage: int) -> Any:
            self._used(stage, "recv")
            if src_stage > stage.stage_index:
                return module._StageBackwardMeta(backward_metas=self._gradients(module, stage))
            given = stage._user_meta.inputs
            metas = self._asked(stage, src_stage) if given is None else _trained(given)
            return module._StageForwardMeta(forward_metas=metas)

        return receive

    def _sender(self) -> Callable[[Any, Any, int], None]:
        def send(stage: Any, meta: Any, dst_stage: int) -> None:
            self._used(stage, "send")
            if dst_stage > stage.stage_index:
                self.peers.tell(_key(dst_stage), meta.forward_metas)

        return send

    def _used(self, stage: Any, kind: str) -> None:
        """The objects travel in a batch, over the communicator of the whole group."""
        if stage.device.type == self.state.device_type:
            self.communicators.used(stage.group or c10d._get_default_group(), kind)

    def _gradients(self, module: ModuleType, stage: Any) -> tuple[Any, ...]:
        metas: list[Any] = []
        for meta in stage._stage_meta.outputs:
            if not meta.requires_grad:
                metas.append(None)
                continue
            if isinstance(meta, module._DTensorMeta):
                self.state.assume(
                    "rank",
                    "the gradient of a distributed tensor comes from the next pipeline stage with "
                    "the placements of the tensor",
                    op="recv_object_list",
                )
            metas.append(dataclasses.replace(meta, requires_grad=False))
        return tuple(metas)

    def _asked(self, stage: Any, src_stage: int) -> tuple[Any, ...]:
        rank = stage._resolve_peer_global_rank(src_stage)
        told = self.peers.ask(rank, _key(stage.stage_index))
        if told is None:
            raise CaptureError(
                f"{self.state.source()}: pipeline stage {stage.stage_index} takes the shapes of "
                f"its inputs from stage {src_stage}, on rank {rank}, which does not run here",
                "PipelineStage(…, input_args=…, output_args=…) with example tensors on the meta "
                "device, or run memplan on the script as a whole, which asks that rank",
            )
        return tuple(told)


def _move(stage: Any) -> None:
    """A traced stage goes to its device; PyTorch would leave it behind if its parameters are fake,
    as they all are here."""
    if not any(parameter.is_meta for parameter in stage.submod.parameters()):
        stage.submod.to(stage.device)


def _trained(metas: tuple[Any, ...]) -> tuple[Any, ...]:
    """Examples as the stage before sends its outputs: made by parameters that are trained."""
    return tuple(
        dataclasses.replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in metas
    )


def _key(stage: int) -> str:
    return f"stage {stage}"

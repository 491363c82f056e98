"""Optimizers' state in the host's memory, streamed through the device while they step."""

from memplan.runtime.host_state.in_effect import HostState

__all__ = ["HostState"]

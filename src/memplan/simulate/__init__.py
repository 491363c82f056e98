"""Events and allocator settings to a `Timeline`: what PyTorch's caching allocator would reserve."""

from memplan.simulate.compare import SegmentComparison, compare_segments
from memplan.simulate.replay import ReplayReport, replay_report
from memplan.simulate.settings import AllocatorSettings
from memplan.simulate.settle import Settled, settled
from memplan.simulate.simulator import simulate
from memplan.simulate.start_state import infer_start
from memplan.simulate.timeline import SegmentEvents, Segments, Timeline

__all__ = [
    "AllocatorSettings",
    "ReplayReport",
    "SegmentComparison",
    "SegmentEvents",
    "Segments",
    "Settled",
    "Timeline",
    "compare_segments",
    "infer_start",
    "replay_report",
    "settled",
    "simulate",
]

"""Records a plain training step as a graph, op by op, where the dispatcher sees it.

The step runs on its real tensors, so the graph has the kernels that PyTorch chose and storages of
the sizes that it asked for. Tensors are told apart by storage and geometry: autograd's copies of a
tensor, and views of the same place, are one node.
"""

from memplan.runtime.compiled.recording.recorder import Recorder

__all__ = ["Recorder"]

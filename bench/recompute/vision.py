"""torchvision's models, importable beside a CPU build of torch as well."""

from __future__ import annotations

from memplan.capture.packages import make_torchvision_importable

_operators = make_torchvision_importable()  # which torchvision looks up while it is imported

from torchvision import models  # noqa: E402

__all__ = ["models"]

"""A refusal names the user's line, and a library's where that is what it is about."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from memplan.runtime.compiled.capture import capture_step
from memplan.runtime.compiled.not_capturable import NotCapturable

LIBRARY = """
import torch

class LayerDrop(torch.nn.Module):
    def forward(self, x):
        if torch.rand([]) < 0.5:
            return x
        return x * 2
"""


def test_a_branch_in_a_library_is_named_with_the_line_that_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "layers_for_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(package.parent))
    library = importlib.import_module("layers_for_a_test")
    monkeypatch.delitem(sys.modules, "layers_for_a_test")
    model = nn.Sequential(nn.Linear(6, 4), library.LayerDrop())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        F.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()

    with pytest.raises(NotCapturable) as refused:
        capture_step(step, model=model, optimizer=optimizer, args=(torch.randn(5, 6),))
    line = step.__code__.co_firstlineno + 1
    assert refused.value.where == f"{__file__}:{line} (in layers_for_a_test/__init__.py:6)"


def test_torchs_own_frames_between_a_step_and_its_operator_are_not_named() -> None:
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> float:
        loss = F.mse_loss(model(x), x[:, :4])
        loss.backward()
        optimizer.step()
        return float(f"{loss.norm():.3f}")

    with pytest.raises(NotCapturable) as refused:
        capture_step(step, model=model, optimizer=optimizer, args=(torch.randn(5, 6),))
    line = step.__code__.co_firstlineno + 4
    assert refused.value.where == f"{__file__}:{line}"

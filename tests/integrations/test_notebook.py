"""The magic `%%memplan`, and the example notebook in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "memory.ipynb"
TRAIN = """%%memplan --gpu 8GiB
model = nn.Linear(1024, 1024).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for calls in range(1000):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(notebook: Any) -> list[list[Any]]:
    """Outputs of the code cells."""
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def shown(outputs: list[Any]) -> str:
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs)


def test_the_example_gives_what_is_committed() -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    committed = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert [shown(outputs) for outputs in run(notebook)] == [shown(kept) for kept in committed]
    assert "does not fit" in shown(committed[2]) and "In[2]:" in shown(committed[2])
    assert "GiB: fits" in shown(committed[3])


def test_the_magic_in_a_kernel_that_trains_for_real() -> None:
    new = nbformat.v4
    cells = [
        "%load_ext memplan\nimport torch\nfrom torch import nn",
        "nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()",
        TRAIN,
        "print('model' in globals(), 'calls' in globals(), torch.cuda.is_available())\n"
        "type(nn.Linear(2, 2).weight) is nn.Parameter",
        "%%memplan\nx = 1",
        "%%memplan\n1 / 0",
        "%%memplan --gpu nocard\nx = 1",
    ]
    notebook = new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells])
    for cell in notebook.cells[4:]:
        cell.metadata.tags = ["raises-exception"]
    outputs = run(notebook)
    assert "GiB: fits" in shown(outputs[2])
    assert outputs[3][0]["text"] == "False False False\n"
    assert outputs[3][1]["data"]["text/plain"] == "True"
    told = ["".join(output.get("traceback", ())) for found in outputs[4:] for output in found]
    assert "asked for no GPU memory" in told[0] and "try: " in told[0]
    assert "ZeroDivisionError" in told[1] and "In[6]" in told[1]
    assert "nocard" in told[2] and "CaptureError" not in told[2]

"""The notebook of examples/ runs from its first cell to its last, and stays small."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "what_heads_keep.ipynb"
MAX_BYTES = 60_000
HAS_JUPYTER = all(find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))


def test_the_committed_notebook_is_small_and_was_run_in_order() -> None:
    text = NOTEBOOK.read_text()
    assert len(text.encode()) < MAX_BYTES
    cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert "stderr" not in {output.get("name") for output in outputs}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_JUPYTER, reason="no nbclient: `make setup` installs it")
def test_every_cell_runs() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=540, resources=place).execute()
    *_, said, strip, heads, events = (
        cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    )
    assert "none" in said[-1]["text"] and r"\boxed{" in said[-1]["text"]
    html = strip[-1]["data"]["text/html"]
    assert "ams-tova" in html and html.count("<s ") > 50
    for figure in (heads, events):
        assert len(figure[-1]["data"]["image/png"]) > 2000

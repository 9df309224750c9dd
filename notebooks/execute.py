"""Run the notebooks of this folder and write them again, with their outputs.

    python notebooks/execute.py [--out FOLDER] [NAME ...]

A cell that fails ends it. What is written says nothing of the machine: no times, no paths.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

HERE = Path(__file__).parent
# Seconds a cell may take.
_LONGEST = 600
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, out: Path) -> None:
    """Run a notebook in a kernel of its own; raises what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    options = Config(KernelManager={"transport": "ipc"})  # no port is opened
    NotebookClient(notebook, timeout=_LONGEST, record_timing=False, config=options).execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    nbformat.validate(notebook)
    nbformat.write(notebook, out / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all notebooks unless given")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    given = parser.parse_args()
    names = given.names or sorted(path.name for path in HERE.glob("*.ipynb"))
    for name in names:
        execute(HERE / name, given.out)
        print(name)


if __name__ == "__main__":
    main()

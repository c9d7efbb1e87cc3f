"""Exports a run's winner.

python -m optimizer.export RUN --out FOLDER [--data DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from engine.artifacts import ArtifactError, ArtifactStore
from optimizer.export.folder import ExportError, export
from optimizer.file_store import FileStore


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m optimizer.export", description="Exports a run's verified winner.")
    parser.add_argument("run", help="the run's id")
    parser.add_argument("--out", required=True, type=Path, help="a folder that does not exist yet")
    parser.add_argument("--data", default=os.environ.get("POLYMORPH_DATA", "data"), type=Path, help="data folder")
    options = parser.parse_args(arguments)
    try:
        state = FileStore(options.data).load(options.run)
        folder = export(state, ArtifactStore(options.data), options.out)
    except (ExportError, ArtifactError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    print(f"Written to {folder}. Serve it with {folder / 'serve.sh'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""TTFT and TPOT of a model on hardware that is not here, from specifications.

    python -m optimizer.cost --device "AWS Trainium2" --model Llama-3.1-70B --tensor 8 --isl 1024 --osl 512 --concurrency 1,16,64

The model is one of `architectures.json` or a folder with a config.json. Each line says what its figures are worth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.models.config import read_config
from engine.models.errors import ModelError
from kernels.hardware import Datasheet, datasheets
from optimizer.cost.architecture import Architecture, of_config, published
from optimizer.cost.deployment import FRAMEWORKS, NUMBER_BYTES, Deployment, DeploymentError
from optimizer.cost.serving import ServingEstimate, fitted_model


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        device, model = find_device(given.device), find_model(given.model)
        print(f"{model.name} in {given.weights} on {given.tensor * given.ranks} x {device.name} ({device.source})")
        for concurrency in (int(c) for c in given.concurrency.split(",")):
            deployment = Deployment(
                device, model, given.framework, given.isl, given.osl, concurrency, given.weights, given.kv, given.tensor,
                given.ranks,
            )  # fmt: skip
            print(line(concurrency, fitted_model().estimate(deployment)))
    except (DeploymentError, ModelError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def line(concurrency: int, found: ServingEstimate) -> str:
    ttft = f"TTFT {1e3 * found.ttft_s:.0f} ms ({1e3 * found.ttft_low:.0f} to {1e3 * found.ttft_high:.0f})"
    tpot = f"TPOT {1e3 * found.tpot_s:.1f} ms ({1e3 * found.tpot_low:.1f} to {1e3 * found.tpot_high:.1f})"
    why = f": {'; '.join(found.reasons)}" if found.reasons else ""
    return f"  {concurrency:>5} requests at once   {ttft}   {tpot}   {found.provenance}{why}"


def find_device(name: str) -> Datasheet:
    known = datasheets()
    if name not in known:
        raise DeploymentError(f"{name!r} has no specifications here: name one of {', '.join(known)}.")
    return known[name]


def find_model(name: str) -> Architecture:
    """Raises DeploymentError, ModelError."""
    if name in published():
        return published()[name]
    if Path(name).is_dir():
        return of_config(read_config(Path(name)), Path(name).name)
    raise DeploymentError(f"{name!r} is no model: name a folder with a config.json or one of {', '.join(published())}.")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description="TTFT and TPOT on hardware that is not here, from specifications.")
    found.add_argument("--device", required=True, help="a name in kernels/hardware.json")
    found.add_argument("--model", required=True, help="a name in optimizer/cost/architectures.json, or a folder")
    found.add_argument("--framework", default="vllm", help=", ".join(FRAMEWORKS))
    found.add_argument("--weights", default="bfloat16", help=", ".join(NUMBER_BYTES))
    found.add_argument("--kv", default="bfloat16", help="bfloat16, fp8")
    found.add_argument("--tensor", type=int, default=1, help="devices that share every matrix")
    found.add_argument(
        "--ranks", type=int, default=1, help="such groups, each with its own requests, that share experts"
    )
    found.add_argument("--isl", type=int, required=True)
    found.add_argument("--osl", type=int, required=True)
    found.add_argument("--concurrency", default="1", help="requests at once; several with commas")
    return found


if __name__ == "__main__":
    sys.exit(main())

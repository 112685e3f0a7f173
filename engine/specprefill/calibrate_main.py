"""`python -m headrace.engine.specprefill.calibrate_main`: find a model's layers, in a process of its own.

The command line (`headrace calibrate`) must not load mlx, so it starts this. Arguments are one JSON object
(`Job`); each line of stdout is one JSON object: `{"stage", "done", "total", "unit"}` for progress, then one
`{"result": …}` or `{"error": "…"}`. Everything else goes to stderr.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from ..loading.loader import LoadProgress, ModelLoadError, load_model
from ..loading.model_files import cache_folder
from .calibration import LONG_TIMES, Calibration, calibrate, save_calibration
from .model_support import check_carry_on, specprefill_support


@dataclass(frozen=True)
class Job:
    """What to do: `model` as for `load_model`; so many prompts of about so many tokens, some longer."""

    model: str | None
    num_prompts: int
    prompt_tokens: int


class CannotCalibrate(Exception):
    """The model can't be calibrated; the message is one line for the person who asked."""


def find_layers(job: Job, out: TextIO) -> dict[str, Any]:
    """Load, calibrate and store; return what `headrace calibrate` shows.

    Raises:
        CannotCalibrate: the model can't prefill sparsely, or its context is too short for the prompts.
        ModelLoadError: the model can't be loaded.
        OSError: the calibration can't be stored.
    """

    def report(progress: LoadProgress) -> None:
        _write(out, asdict(progress))

    loaded = load_model(job.model, on_progress=report)
    if (reason := specprefill_support(loaded.model, loaded.config)) is not None:
        raise CannotCalibrate(f"{loaded.name} can't prefill sparsely: {reason}")
    if job.prompt_tokens >= loaded.context_length:
        raise CannotCalibrate(
            f"prompts of {job.prompt_tokens} tokens do not fit the context of {loaded.name}: "
            f"{loaded.context_length} tokens"
        )
    _write(out, asdict(LoadProgress("read", 0, job.num_prompts, "prompts")))
    calibration = calibrate(
        loaded.model,
        loaded.tokenizer,
        loaded.config,
        num_prompts=job.num_prompts,
        prompt_tokens=job.prompt_tokens,
        long_prompt_tokens=min(LONG_TIMES * job.prompt_tokens, loaded.context_length - 1),
        on_progress=lambda done, total: report(LoadProgress("read", done, total, "prompts")),
    )
    path = save_calibration(calibration, cache_folder() / "calibrations")
    return _shown(loaded.name, str(path), calibration) | {
        "carries_on": check_carry_on(loaded.model, max(calibration.layers), loaded.config)
    }


def _shown(name: str, path: str, calibration: Calibration) -> dict[str, Any]:
    return {
        "name": name,
        "path": path,
        "layers": calibration.layers,
        "num_layers": calibration.num_layers,
        "keep_pcts": calibration.keep_pcts,
        "recall": calibration.recall,
        "chosen_recall": calibration.chosen_recall,
    }


def _write(out: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=out, flush=True)


def main() -> None:
    """Do the job that the only argument describes."""
    # Nothing that a library prints may come between the messages.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _write(out, {"result": find_layers(Job(**json.loads(sys.argv[1])), out)})
    except (CannotCalibrate, ModelLoadError) as error:
        _write(out, {"error": " ".join(str(error).split())})
    except OSError as error:
        _write(out, {"error": f"the calibration can't be stored: {error}"})


if __name__ == "__main__":
    main()

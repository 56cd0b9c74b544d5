"""The files of a fine-tune: that they can be written, and take nothing away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ewc_finetune.checkpoint.checkpoint import check_ending
from ewc_finetune.checkpoint.formats.state_dict import StateDict
from ewc_finetune.checkpoint.formats.transformers_folder import HuggingFace
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.errors import StorageError, UsageError
from ewc_finetune.progress import Progress
from ewc_finetune.runs.folder import check_run_folder
from ewc_finetune.runs.record import Run
from ewc_finetune.storage.atomic import beside, check_output


def written_as(start: LoadedModel, output: Path) -> list[Path]:
    """Return the files that a model will be written as."""
    return [output] if start.checkpoint is None else start.checkpoint.outputs(output)


def check_outputs(
    output: Path,
    start: LoadedModel | None,
    overwrite: bool,
    inputs: Sequence[object],
    earlier: Run | None,
    progress: Progress,
) -> bool:
    """Check the checkpoint's path, and that the run folder beside it takes nothing away.

    Where it is not known what is written, for the model could not be opened, what is there is looked at all the same.

    Returns:
        Whether what is there may be replaced, be it that a run that was stopped was allowed to, or may have written it.
    """
    if earlier is not None:
        then = earlier.document
        written = bool(then.get("writing")) or then["status"] == "finished"  # which `RunFolder.reopen` refuses
        overwrite = overwrite or written or bool(then["options"].get("overwrite"))
    if start is None:
        check_output(output, overwrite, inputs, folder=output.is_dir(), note=progress.note)
    else:
        _check_files(output, start, overwrite, inputs, progress)
    folder = beside(output, ".run")
    if earlier is None:
        check_run_folder(folder, overwrite, progress.note)
    if folder == output:
        raise UsageError(f"the output {output} would stand where its run folder goes. Let it end in .pt, say")
    for source in inputs:
        if isinstance(source, (str, Path)) and folder.resolve() in Path(source).resolve().parents:
            raise StorageError(f"{source} lies in the run folder {folder} of this output. Choose another path")
    return overwrite


def _check_files(
    output: Path, start: LoadedModel, overwrite: bool, inputs: Sequence[object], progress: Progress
) -> None:
    kind = start.checkpoint or StateDict
    for path in written_as(start, output):
        check_output(path, overwrite, inputs, folder=kind.format == HuggingFace.format, note=progress.note)
    if isinstance(start.checkpoint, HuggingFace):
        start.checkpoint.check_folder(output)
    check_ending(output, kind.format, kind.ending)

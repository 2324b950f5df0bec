"""TensorBoard tracker: metrics as scalars, the configuration as text and as hyperparameters."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.observe.completions import Table
from grpo_dist.observe.settings import ShownConfig

_SHOWN = ("reward/mean", "policy/entropy", "rollout/length_tokens")  # shown next to hyperparameters


class TensorBoard:
    def __init__(self, directory: Path, config: ShownConfig, *, purge_step: int | None) -> None:
        """Open the writer. Events of ``purge_step`` and later steps from earlier launches are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # optional
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        self._writer.add_text("config", f"```yaml\n{config.text}```")
        # Not `add_hparams`, which would create another run.
        for part in hparams(config.flat(), dict.fromkeys(_SHOWN, 0.0)):
            self._writer._get_file_writer().add_summary(part)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, table: Table) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self, *, failed: bool) -> None:
        self._writer.close()

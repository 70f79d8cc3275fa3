"""The same run through LightningCLI: everything is in ``config.yaml``.

python examples/cli.py fit --config examples/config.yaml                               # first start, and every restart
python examples/cli.py fit --config examples/config.yaml --trainer.max_steps 400       # a longer run
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

from gpt import GPT, SourceText

if __name__ == "__main__":
    # overwrite: a restarted job finds the config.yaml of its first start; without this LightningCLI refuses to go on.
    LightningCLI(GPT, SourceText, save_config_kwargs={"overwrite": True})

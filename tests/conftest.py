"""Settings for all tests."""

import os

# LightningCLI calls jsonargparse in ways that it deprecates, which is theirs to settle.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

pytest_plugins = ["s3_fixtures"]

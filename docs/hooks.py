"""Hooks of mkdocs.yml: what the site takes from elsewhere, so that it is written once."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files, config):
    """The first page is the first screen of README.md; the command's reference is what its help says."""
    screen = (ROOT / "README.md").read_text().split("\n## The pipeline\n")[0].replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=screen))
    typer = [sys.executable, "-m", "typer", "moe_ops.cli.application", "utils", "docs", "--name", "moe-ops"]
    done = subprocess.run(typer, capture_output=True, text=True, check=True, cwd=ROOT)
    files.append(File.generated(config, "reference/cli.md", content=done.stdout))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to the source tree, which the site does not hold, become their text."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def text_alone(link):
        target = folder.joinpath(link[2].split("#")[0]).resolve()
        if target == ROOT / "README.md":
            return f"[{link[1]}]({os.path.relpath(config.docs_dir, folder)}/index.md)"
        return link[0] if target.is_relative_to(config.docs_dir) else link[1]

    return _LINK.sub(text_alone, markdown)

"""What README and docs become where they are published: the package's page and the site of documents.

There, a link to another file of the repository needs the repository's address. It is in ORCH_REPOSITORY_URL (the release workflow
sets it); without it nothing is invented: such a link becomes its text. The wheel is built with the class, the site with the functions below it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|mailto:|#)[^)\s]+)\)")


def repository() -> str:
    """Return the repository's address, without a slash at its end; empty if it is not known."""
    return os.environ.get("ORCH_REPOSITORY_URL", "").rstrip("/")


def with_absolute_links(text: str, folder: str, version: str, is_here: Callable[[str], bool] = lambda _: False) -> str:
    """Return the page with an address of the repository, at the tag of ``version``, for each link to a file.

    ``folder`` is that of the page in the repository. Links to files that ``is_here`` accepts remain.
    """

    def changed(link: re.Match[str]) -> str:
        file, mark, anchor = link["target"].partition("#")
        path = os.path.normpath(PurePosixPath(folder) / file)
        if is_here(path):
            return link[0]
        if not repository():
            return link["text"]
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository()}/{view}/v{version}/{path}{mark}{anchor})"

    return LINK.sub(changed, text)


class PackageMetadata(MetadataHookInterface):
    """Gives the package's page README with links that work there, and the project's addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what pyproject.toml names as dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, "", metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address := repository():
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{address}/tree/v{metadata['version']}/docs",
                "Changelog": f"{address}/blob/v{metadata['version']}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }


def on_config(config: Any) -> Any:
    """Fill in the folders of the site's navigation: each page of them, README first."""

    def filled(item: Any) -> Any:
        if isinstance(item, dict):
            return {title: [filled(each) for each in pages] for title, pages in item.items()}
        folder = Path(config.docs_dir) / item
        if not folder.is_dir():
            return item
        pages = sorted(folder.glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
        return {item.capitalize(): [f"{item}/{page.name}" for page in pages]}

    config.nav = [filled(item) for item in config.nav]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links that lead out of docs/, or to a folder. The others are left, so that mkdocs refuses those that lead nowhere."""
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    folder = str(PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent)
    return with_absolute_links(
        markdown, folder, version, lambda path: path.startswith("docs/") and not (ROOT / path).is_dir()
    )
